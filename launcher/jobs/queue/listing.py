"""Who holds devices of this machine and who waits for them, read from the claims. Takes and frees nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .leases import Claim, ClaimFolder
from .turn import claim_folders, older_leases, place, together, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A job that holds devices or waits for some.

    Attributes:
        job_id: the job.
        pid: pid of the job's front end.
        state: `holds` or `waits`.
        since_s: time since when the job holds or waits, in seconds since the epoch.
        priority: priority of the job's ticket; None for a job that holds devices.
        devices: devices that the job holds or wants, in words.
        names: UUIDs and slots that it holds, or may choose from.
    """

    job_id: str
    pid: int
    state: Literal["holds", "waits"]
    since_s: float
    priority: int | None
    devices: str
    names: tuple[str, ...]


def list_queue(environ: Mapping[str, str]) -> list[Entry]:
    """Returns the jobs of this user on this machine: those that hold devices, then those that wait, the next first.

    Args:
        environ: XDG_STATE_HOME is where leases and tickets are.
    """
    leases, tickets = ((ClaimFolder(path).others() if path.is_dir() else []) for path in claim_folders(environ))
    older = older_leases(environ)
    leases += [] if older is None else older.others()
    by_job: dict[str, list[Claim]] = {}
    for lease in leases:
        by_job.setdefault(str(lease.content.get("job_id", "?")), []).append(lease)
    holding = [
        _entry(
            held[0],
            state="holds",
            devices=together(sorted((str(one.content.get("label", one.name)) for one in held), key=_by_number)),
            names=[str(one.content.get("device", one.name)) for one in held],
        )
        for held in by_job.values()
    ]
    waiting = [
        _entry(one, state="waits", devices=str(one.content.get("wants", "?")), names=one.content.get("names", []))
        for one in sorted(tickets, key=place)
    ]
    return [*sorted(holding, key=lambda entry: entry.since_s), *waiting]


def _entry(claim: Claim, *, state: Literal["holds", "waits"], devices: str, names: Sequence[str]) -> Entry:
    since_s = claim.content.get("since_s")
    return Entry(
        job_id=str(claim.content.get("job_id", "?")),
        pid=whole(claim, "pid"),
        state=state,
        since_s=float(since_s) if isinstance(since_s, int | float) else 0.0,
        priority=whole(claim, "priority") if state == "waits" else None,
        devices=devices,
        names=tuple(names),
    )


def _by_number(label: str) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", label)]
