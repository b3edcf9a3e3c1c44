"""One launch that loses a process at some moment, held against the oracle; for row A33 and scripts/soak."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from dsrun.launcher.process_modules import AGENT, SPAWNER, SURVEY_SERVER
from support import traces
from support.faults import READY, Job, launched
from support.many_hosts import launched_on_hosts, pids_of
from support.namespaces import NetHost, Rig

#: What is killed, in turn: the front end by each signal that users and systems send it, then each kind of process.
VICTIMS = ("front end SIGKILL", "front end SIGTERM", "front end SIGINT", "agent", "spawner", "rank")
#: The same over several hosts, and what is on one of them besides: what is asked before the job, and the connection.
VICTIMS_ON_HOSTS = (*VICTIMS, "surveyor", "connections")

#: Ranks that all-reduce for ever, each with a child in a session of its own and a segment in /dev/shm while it starts.
PROGRAM = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
{READY}
value = torch.ones(1)
while True:
    dist.all_reduce(value)
"""


def kill_at(folder: Path, victim: str, *, moment_s: float, start: str = "fork") -> str:
    """Launches two ranks and kills one process of the job.

    Args:
        folder: folder for this launch alone.
        victim: one of `VICTIMS`.
        moment_s: moment of the kill, in seconds from the start of dsrun.
        start: start method of the ranks, as for `--start`: `fork` or `exec`.

    Returns:
        what was killed; where the victim was not there (yet), that is the front end, by SIGKILL.

    Raises:
        AssertionError: something is left, or dsrun ended as it should not.
    """
    with launched(folder, PROGRAM, "-n", "2", "--start", start, grace_s=1.0) as job:
        _let_run(job, moment_s)
        job.look()
        spawner = job.spawner()
        of_spawner = job.children(spawner) if spawner is not None else []
        target = {"agent": job.agent(), "spawner": spawner, "rank": next(iter(of_spawner), None)}.get(victim)
        if target is not None:
            job.kill(target)
            _assert_ended(job, {74, 137})
            return victim
        return _kill_front_end(job, victim)


def kill_on_hosts_at(
    rig: Rig, folder: Path, victim: str, *, host: NetHost, moment_s: float, start: str = "fork"
) -> str:
    """Launches a rank on every host of a rig and kills one process of the job, or the connections to one host.

    Args:
        rig: the hosts.
        folder: folder for this launch alone, below the folder of the rig.
        victim: one of `VICTIMS_ON_HOSTS`.
        host: host of the process to kill, if this is not the front end.
        moment_s: moment of the kill, in seconds from the start of dsrun.
        start: start method of the ranks, as for `--start`: `fork` or `exec`.

    Returns:
        what was killed; where the victim was not there, that is the front end, by SIGKILL.

    Raises:
        AssertionError: something is left here or on a host, or dsrun ended as it should not.
    """
    with launched_on_hosts(rig, folder, PROGRAM, "--start", start, grace_s=1.0) as job:
        _let_run(job, moment_s)
        if victim == "connections":
            if host.sshd.cut():
                _assert_ended(job, {74, 75})
                return victim
        elif _is_killed(_target_on(host, victim)):
            # Before there is an agent, preflight names the host.
            _assert_ended(job, {75} if victim == "surveyor" else {74, 137})
            return victim
        return _kill_front_end(job, victim)


def _target_on(host: NetHost, victim: str) -> int | None:
    """Returns a process of that kind on a host; None where there is none."""
    if victim in ("agent", "surveyor"):
        # The login's shell runs the line that starts it, and stays.
        pids = pids_of(host, AGENT if victim == "agent" else SURVEY_SERVER)
        return next((pid for pid in pids if traces.parent_of(pid) in pids), None)
    if victim not in ("spawner", "rank"):
        return None
    # A forked rank has the spawner's command line, but not its parent.
    agents, spawners = pids_of(host, AGENT), pids_of(host, SPAWNER)
    spawner = next((pid for pid in spawners if traces.parent_of(pid) in agents), None)
    if victim == "spawner" or spawner is None:
        return spawner
    return next((pid for pid in sorted(traces.pids()) if traces.parent_of(pid) == spawner), None)


def _is_killed(pid: int | None) -> bool:
    """Kills a process of this test's host; returns whether it was there."""
    try:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return pid is not None


def _let_run(job: Job, moment_s: float) -> None:
    try:
        job.process.wait(moment_s)
    except subprocess.TimeoutExpired:
        return
    raise AssertionError(f"dsrun ended by itself\n{job.said()}")


def _kill_front_end(job: Job, victim: str) -> str:
    """Kills the front end as the victim's name says, or by SIGKILL where it names another one that was not there."""
    if not victim.startswith("front end"):
        victim = f"front end SIGKILL instead of {victim}"
    signum = signal.Signals[victim.split()[2]]
    job.process.send_signal(signum)
    # Before it can catch them, a signal ends Python itself.
    _assert_ended(job, {-signum, 128 + signum})
    return victim


def _assert_ended(job: Job, allowed: set[int]) -> None:
    ended = job.end()
    assert ended.exit_code in allowed, f"exit code {ended.exit_code}\n{ended.text}"
