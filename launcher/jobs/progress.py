"""How far a job has come, from what its ranks and its hosts last said. Reads the ends of files; never fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import LOG_PATTERN, JobPaths
from dsrun.contract.step_records import STEP_EVENT
from dsrun.units import format_duration

from ..records.follow import RecordFollower, last_record
from .live_status import read_live


def last_step(folder: Path) -> int | None:
    """Returns the newest optimizer step that any rank has finished; None where none told of any.

    Args:
        folder: the job's.
    """
    live = read_live(folder)
    steps = [rank.step for rank in live.ranks if rank.step is not None] if live is not None else []
    recorded = last_record(JobPaths(folder).records, STEP_EVENT, with_number="step")
    return max([*steps, *([] if recorded is None else [recorded["step"]])], default=None)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a job that lives does.

    Attributes:
        text: words for what the job waits for, or for how many of its ranks run.
        is_before_start: no rank of it was started yet.
    """

    text: str
    is_before_start: bool


def doing_now(folder: Path) -> Activity:
    """Finds out what a job that lives does at the moment.

    Args:
        folder: the job's.
    """
    waits_for, running = "being prepared", 0
    is_before_start, stops = True, False
    for event in _events(folder):
        match event:
            case {"event": "waiting", "text": str(text)}:
                waits_for = text
            case {"event": "start"}:
                # A failure stops the other ranks of its attempt; a person's wish is followed by no start.
                running, waits_for, stops = 0, "its ranks are being started", False
            case {"event": "rank_started"}:
                running, waits_for, is_before_start = running + 1, "", False
            case {"event": "rank_exit"}:
                running -= 1
            case {"event": "restart", "wait_s": int() | float() as wait_s}:
                waits_for, stops = f"waiting {format_duration(wait_s)} before it is started again", False
            case {"event": "stop"}:
                stops = True
            case _:
                pass
    if stops or waits_for:
        return Activity("being stopped" if stops else waits_for, is_before_start)
    return Activity(_ranks_text(folder, running), is_before_start)


def _ranks_text(folder: Path, running: int) -> str:
    if running <= 0:
        return "its ranks have ended"
    text = "1 rank runs" if running == 1 else f"{running} ranks run"
    has_printed = any(path.stat().st_size for path in folder.glob(LOG_PATTERN))
    return text if has_printed else f"{text} and nothing was printed yet"


def was_asked_to_stop(folder: Path) -> bool:
    """Whether a person has asked a job to end; what its own failures stop does not count.

    Args:
        folder: the job's.
    """
    # Why is the signal itself then, and else what went wrong.
    return any(event.get("event") == "stop" and event.get("why") == event.get("signal") for event in _events(folder))


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        yield from RecordFollower(JobPaths(folder).events).read()
