"""Records of jobs that never ran: a folder as the front end would have left it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.jobs.record import JobRecord, ProcessMark, write_json, write_record
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan

#: When the jobs of tests were created.
NOW = datetime(2026, 11, 21, 7, 33, tzinfo=timezone.utc)


def a_plan(run_dir: Path, *, job_id: str = "a-job", ranks: int = 2, words: tuple[str, ...] = ()) -> LaunchPlan:
    """A launch on this machine."""
    return make_plan(
        Allocation(hosts=(HostSpec(name="localhost", slots=ranks, source="test"),)),
        Program(kind="script", target="train.py", args=words, python=sys.executable),
        job_id=job_id,
        start="fork",
        cwd=str(run_dir.parent),
        env={},
        run_dir=str(run_dir),
        grace_s=10.0,
        nonce="",
    )


def a_record(folder: Path, **changes: Any) -> JobRecord:
    """The record of a job of two ranks whose front end is this process."""
    mark = ProcessMark.of(os.getpid())
    assert mark is not None
    values: dict[str, Any] = {
        "id": folder.name,
        "created": NOW,
        "command": ("run", "-n", "2", "train.py"),
        "masked_words": (),
        "cwd": str(folder.parent),
        "user": "ada",
        "host": os.uname().nodename,
        "front_end": mark,
        "detached": False,
        "queued": False,
        "started": NOW + timedelta(seconds=1),
        "config": None,
        "config_digest": None,
        "ranks": 2,
        "hosts": ("localhost",),
        "plan": json.loads(json.dumps(a_plan(folder, job_id=folder.name).to_json())),
    }
    return JobRecord(**(values | changes))


def leave_job(
    parent: Path,
    job_id: str,
    *,
    outcome: str | None = None,
    exit_code: int = 0,
    failure: Sequence[str] | None = None,
    **changes: Any,
) -> Path:
    """Makes a job's folder with its record.

    Args:
        parent: the folder of jobs.
        job_id: id of the job, which is also the name of its folder.
        outcome: `done`, `failed` or `stopped`; without one it has crashed.
        exit_code: exit code that is recorded with the outcome.
        failure: lines about the failure that are recorded with the outcome; None for no failure.
        changes: fields of the record that are to be others.
    """
    folder = parent / job_id
    folder.mkdir(mode=0o700, parents=True)
    write_record(folder, a_record(folder, **changes))
    if outcome is not None:
        ended = (NOW + timedelta(minutes=2)).isoformat()
        value = {"schema_version": 1, "job_id": job_id, "outcome": outcome, "exit_code": exit_code, "attempts": 1}
        value |= {"ended": ended, "duration_s": 60.0, "run_dir": str(folder), "failure": failure, "ranks": []}
        write_json(JobPaths(folder).outcome, value)
    return folder
