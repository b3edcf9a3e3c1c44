"""Plans for this machine and a sink that remembers, so that a test can run a session in a few lines."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import LaunchPlan, Outside, Program, ProgramKind, StartMethod, make_plan
from dsrun.launcher.protocol import StreamName
from dsrun.launcher.session.agents import Session
from dsrun.launcher.session.job_run import JobRun, Policies
from dsrun.launcher.transport.local import LocalChannel, LocalTransport
from support.processes import kill_left, wait_until_gone

_numbers = itertools.count()
#: Begin of a program of which a thread moves through deep stacks, for ranks that are asked meanwhile where they are.
MOVES = """
import threading
def down(depth, *more):
    return 0 if depth == 0 else down(depth - 1, *more) + len([each for each in more])
def move():
    while True:
        down(300, 1, 2, 3)
threading.Thread(target=move, daemon=True).start()
"""


class RecordingSink:
    """Keeps every line and note; `on_line` runs on the session's thread, as each line arrives."""

    def __init__(self, on_line: Callable[[int, str], None] = lambda rank, text: None) -> None:
        self.shown: list[tuple[int, StreamName, str]] = []
        self.notes: list[str] = []
        #: Parts of lines that were shown before their ends.
        self.begun: list[str] = []
        self._on_line = on_line

    def act_on_lines(self, on_line: Callable[[int, str], None]) -> None:
        """Sets `on_line` later, for an action that needs the session."""
        self._on_line = on_line

    def lines(self, rank: int, stream: StreamName, texts: Sequence[str]) -> None:
        for text in texts:
            self.shown.append((rank, stream, text))
            self._on_line(rank, text)

    def begin_line(self, rank: int, stream: StreamName, text: str) -> None:
        self.begun.append(text)

    def end_line(self, rank: int, stream: StreamName, rest: str) -> None:
        self.begun.append(rest)

    def go_on(self, rank: int, *, typed: bool) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def texts(self, rank: int, stream: StreamName = "stdout") -> list[str]:
        """The lines of one stream."""
        return [text for from_rank, name, text in self.shown if (from_rank, name) == (rank, stream)]


def script_plan(
    folder: Path,
    source: str,
    *args: str,
    ranks: int = 2,
    start: StartMethod = "exec",
    grace_s: float = 10.0,
    env: dict[str, str] | None = None,
    hosts: int = 1,
    outside: Outside | None = None,
) -> LaunchPlan:
    """Writes `source` as a script into `folder` and plans it on this machine."""
    script = folder / "train.py"
    script.write_text(source)
    return program_plan(
        *(folder, "script", str(script), *args),
        ranks=ranks,
        start=start,
        grace_s=grace_s,
        env=env,
        hosts=hosts,
        outside=outside,
    )


def program_plan(
    folder: Path,
    kind: ProgramKind,
    target: str,
    *args: str,
    ranks: int = 2,
    start: StartMethod = "exec",
    grace_s: float = 10.0,
    env: dict[str, str] | None = None,
    hosts: int = 1,
    outside: Outside | None = None,
) -> LaunchPlan:
    """Plans a program on this machine; the run folder is made in `folder`."""
    number = next(_numbers)
    run_dir = folder / f"run{number}"
    run_dir.mkdir(mode=0o700)
    names = ["here", *(f"here{number}" for number in range(2, hosts + 1))]
    return make_plan(
        Allocation(hosts=tuple(HostSpec(name=name, slots=ranks, source="test") for name in names)),
        Program(kind=kind, target=target, args=args, python=sys.executable),
        job_id=f"test-{os.getpid()}-{number}",
        start=start,
        cwd=str(folder),
        env={"OMP_NUM_THREADS": "1"} if env is None else env,
        run_dir=str(run_dir),
        grace_s=grace_s,
        # Hosts that find together have it from whoever started them all.
        nonce=f"nonce-{number}" if outside is None else "nonce-of-all",
        outside=outside,
    )


class RememberingTransport(LocalTransport):
    """Starts agents for real, and knows which it started."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: list[LocalChannel] = []

    def start(self, host: HostSpec, argv: Sequence[str]) -> LocalChannel:
        self.channels.append(super().start(host, argv))
        return self.channels[-1]


@contextmanager
def local_session(plan: LaunchPlan, sink: RecordingSink) -> Generator[Session]:
    """A session on this machine; afterwards no process of the job may be left."""
    with _local(plan, sink) as (transport, output):
        yield Session(plan, transport, output, python=sys.executable)


@contextmanager
def local_job(plan: LaunchPlan, sink: RecordingSink, policies: Policies) -> Generator[JobRun]:
    """A job with its restarts on this machine; every host is this one. Afterwards no process of it may be left."""
    with _local(plan, sink) as (transport, output):
        yield JobRun(plan, transport, output, python=sys.executable, policies=policies)


@contextmanager
def _local(plan: LaunchPlan, sink: RecordingSink) -> Generator[tuple[RememberingTransport, JobOutput]]:
    transport = RememberingTransport()
    output = JobOutput(plan, sink)
    try:
        yield transport, output
        assert wait_until_gone(plan.job_id) == []
    finally:
        output.close()
        kill_left(plan.job_id)
        for channel in transport.channels:
            # A session that was left has not waited for its agents; this process must.
            assert channel.wait(10) is not None
