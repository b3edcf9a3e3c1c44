"""Where a job that failed can go on: the newest complete checkpoint that the runtime recorded.

Reads records and looks for files; reads no checkpoint. A program that does not use the runtime leaves no records, and
finds its own checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract import CHECKPOINT_EVENT, RECORDS_FILE

#: A folder without it is no complete checkpoint. See docs/internals/checkpoint-format.md.
_INDEX_FILE = "index.json"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint.

    Attributes:
        folder: of the checkpoint; it has an index now.
        identity: tells this save from others, also from one into the same folder.
    """

    folder: str
    identity: str


def newest_checkpoint(run_dir: str) -> ResumePoint | None:
    """Returns the newest complete checkpoint of a job; None if there is none.

    Args:
        run_dir: the job's folder.
    """
    found: ResumePoint | None = None
    for record in _checkpoint_records(Path(run_dir) / RECORDS_FILE):
        folder = record.get("path")
        if isinstance(folder, str) and (Path(folder) / _INDEX_FILE).is_file():
            found = ResumePoint(folder, f"{folder}@{record.get('time')}")
    return found


def _checkpoint_records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines:
        # Cheap first: of a long run nearly all records are about steps.
        if CHECKPOINT_EVENT.encode() not in line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            # The rank died in the middle of its last line.
            continue
        match record:
            case {"event": event} if event == CHECKPOINT_EVENT:
                records.append(record)
            case _:
                pass
    return records
