"""Jobs that never ran, with all that a page about a job shows: records, events, ranks, and a machine."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.jobs.live_status import LiveStatus
from dsrun.launcher.jobs.lock import JobLock
from dsrun.launcher.jobs.record import event_line
from dsrun.launcher.protocol import RankStatus
from support.job_records import leave_job
from support.recorded_runs import append_records

JOB_ID = "20261121-0733-abcd"


@contextmanager
def running_job(jobs: Path, *, job_id: str = JOB_ID, ranks: int = 4, **changes: Any) -> Generator[Path]:
    """A job whose front end lives, for the time of a `with`; gives its folder."""
    folder = leave_job(jobs, job_id, ranks=ranks, **changes)
    lock = JobLock(folder)
    try:
        yield folder
    finally:
        lock.release()


def leave_files(
    folder: Path,
    *,
    records: Sequence[Mapping[str, Any]] = (),
    events: Sequence[tuple[str, Mapping[str, Any]]] = (),
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
) -> None:
    """Writes records and events of a job, and what its machine has."""
    append_records(folder, records)
    with JobPaths(folder).events.open("ab") as file:
        file.writelines(event_line(name, fields) for name, fields in events)
    gpus = [] if gpu_bytes is None else [{"memory_total_bytes": gpu_bytes}]
    probe = {"gpus": gpus, "memory": {"total_bytes": host_bytes}}
    JobPaths(folder).machine.write_text(json.dumps({"probe": probe}))


def leave_ranks(folder: Path, hosts: Sequence[str], *, idle_s: Mapping[int, float] | None = None) -> None:
    """Writes how the ranks fare, as their hosts would have told it.

    Args:
        folder: folder of the job.
        hosts: host of each rank, by rank.
        idle_s: seconds without progress, by rank; 0 for others.
    """
    live = LiveStatus(folder, hosts, clock=lambda: 1.0)
    statuses = [
        RankStatus(
            rank=rank,
            beats=1,
            step=10,
            idle_s=(idle_s or {}).get(rank, 0.0),
            waited_s=0.0,
            phase="forward",
            collective="",
            cpu_percent=97.0,
            rss_bytes=1 << 30,
        )
        for rank in range(len(hosts))
    ]
    live.pulse(statuses)
    live.write()
