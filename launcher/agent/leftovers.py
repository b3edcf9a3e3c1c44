"""Ends what is left on this host of a job that nobody watches any more: its agent is gone, and did not get to do it.

A job ends by itself whatever dies, but for one case: agent and spawner are killed at the same moment, and a rank had
children, which carry no parent-death signal. Whoever learns of such a death runs this program on the host: the front
end that lost an agent, and `dsrun stop` of a job whose front end crashed. Watches nothing and is part of no job.

[Note: whose a process is] A process belongs to a job if the job's id and nonce are in its environment, or the kernel
has it in the job's control group (a program may write over its environment). Of another user, or below an agent that
lives, it is left alone. Never by name or pattern.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import psutil

from dsrun.contract.environment import JOB_ID_ENV, NONCE_ENV, digest_of

from .. import processes
from ..isolated_command import isolated_command
from ..process_modules import AGENT, AGENT_BEFORE, LEFTOVERS
from .job_files import remove_left
from .memory_copy_folder import remove_copies
from .start.cgroup_scope import job_of_scope, left_scopes, remove_empty_scopes

#: From asking to killing: nobody is left to save for.
_GRACE_S = 2.0
#: From the first SIGKILL to giving up.
_KILL_PATIENCE_S = 10.0
#: Between two rounds of killing, for what was forked meanwhile.
_ROUND_S = 0.2


def sweep_command(python: str, job_id: str, nonce: str | None = None) -> list[str]:
    """Returns the command that sweeps a job on the host where it is run; it prints what it did as JSON on stdout.

    Args:
        python: the interpreter; dsrun must be importable there.
        job_id: the job.
        nonce: secret word of the attempt to sweep; None for all attempts of the job. The command carries its digest, as
            anybody can read command lines.
    """
    mark = [] if nonce is None else [digest_of([nonce])]
    return isolated_command(python, LEFTOVERS, job_id, *mark)


def main() -> None:
    """Entry of the process; argv: the job's id, and what stands for its nonce, see `sweep_command`.

    Prints `{"agents": [pid], "ended": [{"pid", "name"}], "left": [pid]}`: agents that live and answer for their
    processes, processes that were ended, and those that outlived SIGKILL. The exit code is 1 if any did.
    """
    job_id, mark, *_ = [*sys.argv[1:], None]
    assert job_id, "the job's id is the first argument"
    ended = _end_all(job_id, mark)
    left = sorted(process.pid for process in ended if processes.lives(process))
    agents = sorted(_agents(job_id))
    if not agents:
        for scope in left_scopes(job_id):
            scope.remove()
        # A lost attempt's copies are the next one's to find; with no attempt named, the job is over.
        for refusal in [*remove_left(job_id), *(remove_copies(job_id) if mark is None else [])]:
            print(refusal, file=sys.stderr)
    remove_empty_scopes()
    gone = [{"pid": process.pid, "name": name} for process, name in ended.items() if process.pid not in left]
    print(json.dumps({"agents": agents, "ended": gone, "left": left}))
    sys.exit(1 if left else 0)


def _end_all(job_id: str, mark: str | None) -> dict[psutil.Process, str]:
    """Asks, then kills, in rounds until nothing more is found; returns all that were found, with their names."""
    found = {process: _name(process) for process in _orphans(job_id, mark)}
    for process in found:
        processes.send(process, signal.SIGTERM)
    _wait_for(found, _GRACE_S)
    deadline_s = time.monotonic() + _KILL_PATIENCE_S
    while (left := _orphans(job_id, mark)) and time.monotonic() < deadline_s:
        found |= {process: _name(process) for process in left if process not in found}
        for process in left:
            processes.send(process, signal.SIGKILL)
        _wait_for(left, _ROUND_S)
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """A process that lives."""

    process: psutil.Process
    parent: int
    is_agent: bool
    is_of_job: bool


def _orphans(job_id: str, mark: str | None) -> list[psutil.Process]:
    """Returns this user's processes of the job that no living agent is above. See [Note: whose a process is]."""
    seen = {one.process.pid: one for one in _look(job_id, mark)}
    # Whoever runs this may be part of the job itself.
    spared = set(_line(os.getpid(), seen))
    return [
        one.process
        for pid, one in seen.items()
        if one.is_of_job and pid not in spared and not any(seen[above].is_agent for above in _line(pid, seen))
    ]


def _agents(job_id: str) -> list[int]:
    return [one.process.pid for one in _look(job_id, None) if one.is_agent]


def _line(pid: int, seen: dict[int, _Seen]) -> Iterable[int]:
    """Yields a process and those above it; the ones of other users end it."""
    line: list[int] = []
    while pid in seen and pid not in line:
        line.append(pid)
        pid = seen[pid].parent
    return line


def _look(job_id: str, mark: str | None) -> Iterable[_Seen]:
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_of_job = _is_of_job(process.pid, job_id, mark)
                yield _Seen(process, process.ppid(), _is_agent(process.pid, job_id), is_of_job)
        except (psutil.Error, OSError):
            # It has ended meanwhile, or is of a kind that even its user may not look into.
            continue


def _is_agent(pid: int, job_id: str) -> bool:
    words = _read(pid, "cmdline").split(b"\0")
    return os.fsencode(job_id) in words and words[:-1][-2:-1] in _agent_codes()


def _agent_codes() -> list[list[bytes]]:
    # The last word but one of an agent's command line, whatever interpreter and options are in front of it.
    return [[os.fsencode(isolated_command("python", name, "job")[-2])] for name in (AGENT, *AGENT_BEFORE)]


def _is_of_job(pid: int, job_id: str, mark: str | None) -> bool:
    for line in _read(pid, "cgroup").decode(errors="replace").splitlines():
        if line.startswith("0::") and any(job_of_scope(name) == job_id for name in line.split("/")[1:]):
            return True
    variables = _read(pid, "environ").split(b"\0")
    if f"{JOB_ID_ENV}={job_id}".encode() not in variables:
        return False
    nonces = [variable.partition(b"=")[2] for variable in variables if variable.startswith(f"{NONCE_ENV}=".encode())]
    return mark is None or any(digest_of([os.fsdecode(nonce)]) == mark for nonce in nonces)


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _wait_for(ending: Collection[psutil.Process], patience_s: float) -> None:
    """Waits until all have ended, or time is up."""
    deadline_s = time.monotonic() + patience_s
    for process in ending:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if processes.lives(process):
                select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    main()
