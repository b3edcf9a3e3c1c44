"""What the ranks of a job waited in, read from its records; and which rank the others wait for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.wait_records import OTHER_LABEL, WAITS_EVENT, WaitRecord, WaitSpread, from_fields

#: Of a step: less than this is no reason to look at a rank.
_HELD_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """A rank that the others wait for.

    Attributes:
        rank: number of the rank.
        held_s: seconds a step that the others wait longer than it does, in all collectives together.
        collective: name of the collective in which they do most.
        collective_s: seconds a step that they wait there longer than it does.
    """

    rank: int
    held_s: float
    collective: str
    collective_s: float


def read_waits(folder: Path) -> WaitRecord | None:
    """Reads the newest record of waits of a job's last attempt; None where there is none.

    Args:
        folder: the job's.
    """
    newest: WaitRecord | None = None
    try:
        file = JobPaths(folder).records.open("rb")
    except FileNotFoundError:
        return None
    with file:
        for line in file:
            if b'"start"' not in line and b'"waits"' not in line:
                continue
            try:
                fields: Any = json.loads(line)
                match fields:
                    case {"event": "start"}:
                        # The job was started again: its ranks are other processes.
                        newest = None
                    case {"event": event} if event == WAITS_EVENT:
                        newest = from_fields(fields)
                    case _:
                        pass
            except (ValueError, KeyError, TypeError):
                # Half a line, or another version's.
                continue
    return newest


def waited_for(record: WaitRecord) -> WaitedFor | None:
    """Returns the rank that the others wait for; None where all wait about alike.

    Args:
        record: the waits of all ranks.
    """
    held_s = _held_s(record.total, record.ranks)
    if held_s < _HELD_SHARE * record.step_s:
        return None
    rank = record.total.least_rank
    theirs = [each for each in record.labels if each.least_rank == rank and each.label != OTHER_LABEL]
    where = max(theirs or record.labels, key=lambda each: _held_s(each, record.ranks))
    return WaitedFor(rank, held_s, where.label, _held_s(where, record.ranks))


def _held_s(spread: WaitSpread, ranks: int) -> float:
    """Returns how much longer the others wait than the rank that waits least; of two ranks there is one other."""
    return (spread.most_s if ranks == 2 else spread.median_s) - spread.least_s
