"""`dsrun stop`: asks the front end of a job to end it, and waits until it has. What that does stands in the session."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from dsrun.errors import DsrunError, Problem

from ..agent.leftovers import sweep_command
from ..jobs.front_end_process import FrontEndProcess, front_end_of
from ..jobs.listing import Job, JobState, find_job, read_job
from ..jobs.progress import was_asked_to_stop
from ..jobs.text import state_text
from ..options.job_argument import job_argument
from ..options.types import parse_seconds
from ..run.outcome_text import closing

#: For a front end to take note of a wish; one that waits in the queue ends without a note.
_NOTE_PATIENCE_S = 5.0
_LOOK_S = 0.02


@click.command("stop")
@click.option("--now", is_flag=True, help="Kill the ranks without grace.")
@click.option("--timeout", type=parse_seconds, metavar="SECONDS", help="Wait for the end no longer than this.")
@job_argument(nargs=-1)
def command(now: bool, timeout: float | None, jobs: Sequence[str]) -> int:
    """End jobs as Ctrl-C does, and wait until they have ended.

    Ranks get SIGTERM and the grace their job was started with; asking once more changes nothing, `--now` does. A job
    that waits in the queue leaves it. What a crashed job may have left on this host is ended too.
    """
    found = {job.id: job for job in (find_job(name, os.environ) for name in jobs)}
    with ExitStack() as stack:
        front_ends: dict[str, FrontEndProcess] = {}
        for job in found.values():
            if job.state.is_live:
                front_ends[job.id] = stack.enter_context(front_end_of(job.record))
        for job in found.values():
            if job.id in front_ends:
                if now:
                    front_ends[job.id].send(signal.SIGQUIT)
                else:
                    _ask(front_ends[job.id], job.folder)
        deadline_s = None if timeout is None else time.monotonic() + timeout
        problems: list[Problem] = []
        for job in found.values():
            if job.id in front_ends:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                has_ended = front_ends[job.id].wait(left_s)
            else:
                has_ended = True
            if has_ended:
                _tell(job)
            else:
                way_out = f"`dsrun stop --now {job.id}` kills its ranks"
                problems.append(Problem(f"job {job.id} has not ended within {timeout:g}s", way_out))
    if problems:
        raise DsrunError.of(problems)
    return 0


def _ask(front_end: FrontEndProcess, folder: Path) -> None:
    """Asks a job to end, once: a second SIGTERM would kill ranks that still save.

    Whoever asks holds a lock on the folder until the front end has taken note, so that of two that ask at the same
    moment the later one sees it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if was_asked_to_stop(folder) or not front_end.send(signal.SIGTERM):
            return
        deadline_s = time.monotonic() + _NOTE_PATIENCE_S
        while not front_end.wait(_LOOK_S) and not was_asked_to_stop(folder) and time.monotonic() < deadline_s:
            pass
    finally:
        os.close(descriptor)


def _tell(job: Job) -> None:
    """Says how a job has ended."""
    now = read_job(job.folder) or job
    if now.state is JobState.CRASHED:
        text = f"job {job.id}: crashed, {_sweep(now)}"
    elif now.state is JobState.UNKNOWN:
        text = f"job {job.id} has ended, how is not known: outcome.json cannot be read"
    elif now.outcome is None:
        text = f"job {job.id}: its front end does not answer any more"
    elif job.state.is_live:
        text = closing(now.outcome)
    else:
        text = f"job {job.id} had ended already: {state_text(now)}"
    click.echo(f"dsrun: {text}", err=True)


def _sweep(job: Job) -> str:
    """Ends what a crashed job left on this host; says what that was."""
    if job.record.host != os.uname().nodename:
        return f"on {job.record.host}; `dsrun stop {job.id}` there ends what is left"
    done = subprocess.run(sweep_command(sys.executable, job.id), stdin=subprocess.DEVNULL, capture_output=True)
    try:
        found: dict[str, list[Any]] = json.loads(done.stdout)
    except ValueError:
        said = os.fsdecode(done.stderr).strip().splitlines()
        raise DsrunError(f"job {job.id}: what it left cannot be looked for: {(said or ['no word'])[-1]}") from None
    if found["left"]:
        return f"processes {', '.join(map(str, found['left']))} did not end after SIGKILL"
    if found["agents"]:
        return f"its agent (pid {found['agents'][0]}) is ending it"
    count = len(found["ended"])
    return "nothing of it is left" if not count else f"{count} process{'es' if count > 1 else ''} of it ended"
