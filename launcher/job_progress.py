"""How far a job has come, from what its ranks and its hosts last said. Reads the ends of files; never fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dsrun.contract import RECORDS_FILE

from .job_folder import EVENTS_FILE
from .live_status import read_live

#: The end of the records, in which the last step must stand: a record is a few hundred bytes.
_TAIL_BYTES = 1 << 16


def last_step(folder: Path) -> int | None:
    """Returns the newest optimizer step that any rank has finished; None where none told of any.

    Args:
        folder: the job's.
    """
    live = read_live(folder)
    steps = [rank.step for rank in live.ranks if rank.step is not None] if live is not None else []
    recorded = _recorded_step(folder / RECORDS_FILE)
    return max([*steps, *([] if recorded is None else [recorded])], default=None)


def was_asked_to_stop(folder: Path) -> bool:
    """Whether a person has asked a job to end; what its own failures stop does not count.

    Args:
        folder: the job's.
    """
    try:
        lines = (folder / EVENTS_FILE).read_bytes().splitlines()
    except OSError:
        return False
    return any(_is_stop_by_person(line) for line in lines if b'"stop"' in line)


def _is_stop_by_person(line: bytes) -> bool:
    try:
        event: Any = json.loads(line)
    except ValueError:
        return False
    # Why is the signal itself then, and else what went wrong.
    return isinstance(event, dict) and event.get("event") == "stop" and event.get("why") == event.get("signal")


def _recorded_step(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if b'"step"' not in line:
            continue
        try:
            record: Any = json.loads(line)
        except ValueError:
            # Cut off by the reading, or still being written.
            continue
        if isinstance(record, dict) and record.get("event") == "step" and isinstance(record.get("step"), int):
            return record["step"]
    return None
