"""How start-up and the front end's cost grow with the number of hosts: agents on this machine, and scripted hosts.

    python scripts/bench/scale.py [--runs 3] [--agents 1 16 64 256] [--scripted 16 64 256 1024]

Every measurement is a job in a process of its own, one rank a host. With agents, each host is a real agent and a real
rank on this machine, which lives until the last one has started; all share the machine's cores, so that what grows with
their number is its load as well.
Scripted hosts speak through the fake transport, so that the front end alone is measured.

    start-up  from the job's start to the last rank's
    CPU       of the front end for the whole job, by a host; starting the agents' processes counts, they do not
    memory    the most the front end had resident
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rounds import Bar, Rows

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.protocol import Exit, Finished, Hello, Listening, Meet, Output, Start, Started
from dsrun.launcher.session.job_run import JobRun, Policies
from dsrun.launcher.transport.base import Transport
from dsrun.launcher.transport.fake import Await, FakeTransport, Step
from dsrun.launcher.transport.local import LocalTransport

LIMIT_S = 600.0
#: Of the front end's CPU for one host.
BAR_MS = 20.0


class Silence:
    """A console that shows nothing."""

    def lines(self, rank: int, stream: str, texts: Sequence[str]) -> None:
        """See `Console`."""

    def note(self, text: str) -> None:
        """See `Console`."""


class GateOutput(JobOutput):
    """A job's output that lets all ranks go on once the last one has started.

    Args:
        plan: the job.
        gate: the pipe on which they wait, one byte each.
    """

    def __init__(self, plan: LaunchPlan, gate: Path) -> None:
        super().__init__(plan, Silence())
        self._let_through = self._waited_for = plan.world_size
        os.mkfifo(gate)
        # For reading too, so that neither end waits for the other to come.
        self._gate = os.open(gate, os.O_RDWR)

    def event(self, name: str, **fields: Any) -> None:
        """See `Sink`."""
        super().event(name, **fields)
        if name == "rank_started":
            self._waited_for -= 1
            if self._waited_for == 0:
                os.write(self._gate, b"." * self._let_through)


def plan_for(hosts: int, folder: Path, gate: Path) -> LaunchPlan:
    """Plans one rank on each host."""
    return make_plan(
        Allocation(hosts=tuple(HostSpec(name=f"n{number:04}", slots=1, source="scale") for number in range(hosts))),
        Program(kind="command", target="head", args=("-c", "1", str(gate)), python=sys.executable),
        job_id=f"scale-{os.getpid()}",
        start="exec",
        cwd=str(folder),
        env={},
        run_dir=str(folder),
        grace_s=10.0,
        nonce="nonce",
    )


def scripts(plan: LaunchPlan) -> dict[str, list[Step]]:
    """Returns what each scripted host says: that it runs its rank, ten lines of it, and its end."""
    now_s = time.time()
    said: dict[str, list[Step]] = {}
    for node in plan.nodes:
        meets: Step = Await(Meet) if node.node_rank else Listening(address="127.0.0.1", port=29400)
        lines = [
            Output(rank=node.node_rank, stream="stdout", sequence=number, time_s=now_s, text=f"step {number}\n")
            for number in range(10)
        ]
        said[node.host.name] = [
            Await(Start),
            Hello(pid=1, time_s=now_s),
            meets,
            Started(pids=[2]),
            *lines,
            Exit(rank=node.node_rank, status=0, time_s=now_s),
            Finished(unkillable=[]),
        ]
    return said


def run_one(kind: str, hosts: int) -> dict[str, float]:
    """Runs a job in this process, which is measured as a whole; returns the figures."""
    with tempfile.TemporaryDirectory() as name:
        gate = Path(name) / "gate"
        plan = plan_for(hosts, Path(name), gate)
        transport: Transport = LocalTransport() if kind == "agents" else FakeTransport(scripts(plan))
        output = GateOutput(plan, gate)
        before = resource.getrusage(resource.RUSAGE_SELF)
        outcome = JobRun(plan, transport, output, python=sys.executable, policies=Policies()).run()
        after = resource.getrusage(resource.RUSAGE_SELF)
        output.close()
        assert outcome.exit_code == 0, outcome.report.render() if outcome.report else outcome.exit_code
        events = [json.loads(line) for line in (Path(name) / "events.jsonl").read_text().splitlines()]
    started = [event["time"] for event in events if event["event"] == "rank_started"]
    assert len(started) == hosts, f"{len(started)} of {hosts} hosts have started"
    began = next(event["time"] for event in events if event["event"] == "start")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"startup_s": max(started) - began, "cpu_ms": cpu_s * 1e3 / hosts, "rss_mb": after.ru_maxrss * 1024 / 1e6}


def main() -> None:
    """Runs each size in turn, round by round, and prints a table for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="rounds that count")
    parser.add_argument("--agents", type=int, nargs="*", default=[1, 16, 64, 256], help="hosts with real agents")
    parser.add_argument("--scripted", type=int, nargs="*", default=[16, 64, 256, 1024], help="hosts that are scripts")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "HOSTS"), help="measure once, in this process; JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_one(args.one[0], int(args.one[1]))))
        return
    sizes = [("agents", hosts) for hosts in args.agents] + [("scripted", hosts) for hosts in args.scripted]
    startup, share, cpu, memory = (Rows(args.runs) for _ in range(4))
    for round_ in startup.rounds():
        for kind, hosts in sizes:
            words = [sys.executable, __file__, "--one", kind, str(hosts)]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, timeout=LIMIT_S)
            found = json.loads(done.stdout)
            name = f"{hosts} {kind}"
            startup.add(name, found["startup_s"], round_)
            share.add(name, found["startup_s"] * 1e3 / hosts, round_)
            cpu.add(name, found["cpu_ms"], round_)
            memory.add(name, found["rss_mb"], round_)
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {args.runs} rounds")
    print(f"\n## Start-up\n{startup.table('s', {})}")
    print(f"\n## Start-up, a host\n{share.table('ms', {})}")
    bars = {f"{hosts} {kind}": [Bar(BAR_MS)] for kind, hosts in sizes}
    print(f"\n## CPU of the front end, a host\n{cpu.table('ms', bars)}")
    print(f"\n## Memory of the front end\n{memory.table('MB', {})}")


if __name__ == "__main__":
    main()
