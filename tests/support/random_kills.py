"""One launch that loses a process at some moment, held against the oracle; for row A33 and scripts/soak."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from support.faults import READY, launched

#: What is killed, in turn: the front end by each signal that users and systems send it, then each kind of process.
VICTIMS = ("front end SIGKILL", "front end SIGTERM", "front end SIGINT", "agent", "spawner", "rank")

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
        folder: for this launch alone.
        victim: one of `VICTIMS`.
        moment_s: when, in seconds from the start.
        start: as `--start`.

    Returns:
        what was killed; where the victim was not there (yet), that is the front end, by SIGKILL.

    Raises:
        AssertionError: something is left, or dsrun ended as it should not.
    """
    with launched(folder, PROGRAM, "-n", "2", "--start", start, grace_s=1.0) as job:
        try:
            job.process.wait(moment_s)
        except subprocess.TimeoutExpired:
            pass
        else:
            raise AssertionError(f"dsrun ended by itself\n{job.said()}")
        job.look()
        spawner = job.spawner()
        of_spawner = job.children(spawner) if spawner is not None else []
        target = {"agent": job.agent(), "spawner": spawner, "rank": next(iter(of_spawner), None)}.get(victim)
        if victim.startswith("front end"):
            signum = signal.Signals[victim.split()[-1]]
            job.process.send_signal(signum)
        elif target is not None:
            signum = signal.SIGKILL
            job.kill(target)
        else:
            victim, signum = f"front end SIGKILL instead of {victim}", signal.SIGKILL
            job.process.kill()
        ended = job.end()
        # Before it can catch them, a signal ends Python itself.
        allowed = {-signum, 128 + signum} if victim.startswith("front end") else {74, 137}
        assert ended.exit_code in allowed, f"exit code {ended.exit_code}\n{ended.text}"
    return victim
