"""Which processes of a job are alive, and waiting for their end. Ends nothing by itself but what a test names."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from dsrun.contract.environment import JOB_ID_ENV


def job_processes(job_id: str) -> list[int]:
    """Every live process that carries the job's id in its environment, or as a word of its command line (agents)."""
    # Every command line ends with an empty word: without an id this would be every process of the machine.
    assert job_id, "a job has an id"
    variable, word = f"{JOB_ID_ENV}={job_id}".encode(), job_id.encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if variable in variables or word in words:
            found.append(int(entry.name))
    return found


def wait_until_gone(job_id: str, *, timeout_s: float = 10.0) -> list[int]:
    """Waits for the end of every process of the job; returns those that are left when the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while left := job_processes(job_id):
        # One that is not there any more counts as ended; the listing is repeated, as it may have had children.
        if not all(wait_for_end(pid, timeout_s=deadline_s - time.monotonic()) for pid in left):
            return job_processes(job_id)
    return []


def wait_for_end(pid: int, *, timeout_s: float) -> bool:
    """Waits for a process to end; returns whether it did."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(descriptor)


def kill_left(job_id: str) -> None:
    """Kills what is left of a job, so that a failing test does not disturb the next."""
    for pid in job_processes(job_id):
        os.kill(pid, signal.SIGKILL)
