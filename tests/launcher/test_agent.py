"""The agent answers for every process of the job on its host, whatever its front end does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from dsrun.launcher.plan import LaunchPlan, StartMethod
from dsrun.launcher.protocol import (
    Exit,
    Failed,
    Finished,
    FrameReader,
    Hello,
    Kill,
    Message,
    Output,
    Start,
    Started,
    Stop,
    encode,
)
from dsrun.launcher.worker import isolated_command
from support.jobs import script_plan
from support.processes import job_processes, kill_left, wait_for_end, wait_until_gone

pytestmark = pytest.mark.timeout(40)
M = TypeVar("M")


class Agent:
    """A real agent with this test as its front end."""

    def __init__(self, plan: LaunchPlan, start: Start | None = None) -> None:
        self.process = subprocess.Popen(
            isolated_command(sys.executable, "dsrun.launcher.agent", plan.job_id),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = FrameReader()
        self._messages: list[Message] = []
        self.send(Start(plan=plan.to_json(), node_rank=0) if start is None else start)

    def send(self, message: Message) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode(message))
        self.process.stdin.flush()

    def next(self) -> Message | None:
        assert self.process.stdout is not None
        while not self._messages:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def until(self, wanted: type[M]) -> M:
        while (message := self.next()) is not None:
            if isinstance(message, wanted):
                return message
        raise AssertionError(f"the agent ended without {wanted.__name__}")

    def until_ready(self, ranks: int) -> None:
        ready: dict[int, str] = {}
        while sum("ready" in text for text in ready.values()) < ranks:
            output = self.until(Output)
            ready[output.rank] = ready.get(output.rank, "") + output.text

    def rest(self) -> list[Message]:
        return list(iter(self.next, None))

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextmanager
def agent_for(plan: LaunchPlan, start: Start | None = None) -> Iterator[Agent]:
    agent = Agent(plan, start)
    try:
        yield agent
        assert agent.process.wait(20) is not None
        assert wait_until_gone(plan.job_id) == []
    finally:
        kill_left(plan.job_id)
        agent.process.wait(10)
        for pipe in (agent.process.stdin, agent.process.stdout):
            assert pipe is not None
            pipe.close()


WAIT = "import threading\nprint('ready')\nthreading.Event().wait()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
#: Double fork and setsid: neither child, nor session, nor process group of the rank any more.
DAEMON = (
    "import os, sys, time\n"
    "read, write = os.pipe()\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        os.write(write, str(os.getpid()).encode()); os.close(write)\n"
    "        time.sleep(1000)\n"
    "    os._exit(0)\n"
    "os.close(write)\n"
    "sys.stdout.write('daemon %s' % os.read(read, 20).decode())\n"
)


def statuses(messages: list[Message]) -> dict[int, int]:
    return {message.rank: message.status for message in messages if isinstance(message, Exit)}


def test_a_job_is_told_from_hello_to_finished(tmp_path: Path) -> None:
    source = "import os, sys\nprint('out'); print('err', file=sys.stderr)\nexit(int(os.environ['RANK']))"
    with agent_for(script_plan(tmp_path, source)) as agent:
        messages = agent.rest()
    assert isinstance(messages[0], Hello)
    assert isinstance(messages[-1], Finished)
    started = next(message for message in messages if isinstance(message, Started))
    assert len(started.pids) == 2
    assert statuses(messages) == {0: 0, 1: 1}
    for rank in (0, 1):
        outputs = [message for message in messages if isinstance(message, Output) and message.rank == rank]
        assert "".join(message.text for message in outputs if message.stream == "stdout") == "out\n"
        assert "".join(message.text for message in outputs if message.stream == "stderr") == "err\n"
        assert [message.sequence for message in outputs] == list(range(len(outputs)))


def test_ranks_are_asked_when_the_front_end_is_gone(tmp_path: Path) -> None:
    said = tmp_path / "asked"
    source = f"import signal, sys\nsignal.signal(15, lambda *_: (open({str(said)!r}, 'a').write('x'), sys.exit(0)))\n"
    with agent_for(script_plan(tmp_path, source + WAIT)) as agent:
        agent.until_ready(2)
        agent.hang_up()
    assert said.read_text() == "xx"


def test_one_grace_holds_for_all_ranks_that_ignore_the_signal(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, STUBBORN, ranks=3, grace_s=1.0)) as agent:
        agent.until_ready(3)
        began_s = time.monotonic()
        agent.send(Stop(signal=signal.SIGTERM))
        messages = agent.rest()
        took_s = time.monotonic() - began_s
    assert statuses(messages) == {0: -9, 1: -9, 2: -9}
    assert 1.0 <= took_s < 2.5


def test_kill_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, STUBBORN, grace_s=1000)) as agent:
        agent.until_ready(2)
        agent.send(Stop(signal=signal.SIGTERM))
        agent.send(Kill())
        assert statuses(agent.rest()) == {0: -9, 1: -9}


def test_ranks_get_the_very_signal_that_was_sent(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, WAIT)) as agent:
        agent.until_ready(2)
        agent.send(Stop(signal=signal.SIGUSR1))
        assert statuses(agent.rest()) == {0: -10, 1: -10}


def test_a_detached_grandchild_ends_with_the_job(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, DAEMON, ranks=1)) as agent:
        daemon = int(agent.until(Output).text.split()[1])
        messages = agent.rest()
        assert statuses(messages) == {0: 0}
        assert wait_for_end(daemon, timeout_s=0)


def test_a_detached_grandchild_that_ignores_the_signal_is_killed_after_the_grace(tmp_path: Path) -> None:
    source = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DAEMON
    with agent_for(script_plan(tmp_path, source, ranks=1, grace_s=0.5)) as agent:
        daemon = int(agent.until(Output).text.split()[1])
        assert isinstance(agent.rest()[-1], Finished)
        assert wait_for_end(daemon, timeout_s=0)


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_killed_spawner_takes_its_ranks_along_and_is_reported(tmp_path: Path, start: StartMethod) -> None:
    with agent_for(script_plan(tmp_path, WAIT, start=start)) as agent:
        agent.until_ready(2)
        (spawner,) = children(agent.process.pid)
        os.kill(spawner, signal.SIGKILL)
        messages = agent.rest()
    failed = next(message for message in messages if isinstance(message, Failed))
    assert failed.reason == "the spawner was killed by SIGKILL before its ranks ended"
    assert statuses(messages) == {0: -9, 1: -9}


def test_a_stopped_spawner_does_not_keep_the_job_from_ending(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, WAIT)) as agent:
        agent.until_ready(2)
        (spawner,) = children(agent.process.pid)
        os.kill(spawner, signal.SIGSTOP)
        agent.send(Kill())
        assert isinstance(agent.rest()[-1], Finished)


def test_sigterm_to_the_agent_itself_stops_the_job(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, WAIT)) as agent:
        agent.until_ready(2)
        agent.process.send_signal(signal.SIGTERM)
        assert statuses(agent.rest()) == {0: -15, 1: -15}


def test_a_stop_before_the_ranks_exist_starts_none(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, WAIT, start="fork")
    with agent_for(plan) as agent:
        agent.send(Stop(signal=signal.SIGTERM))
        messages = agent.rest()
    assert isinstance(messages[-1], Finished)
    assert statuses(messages) == {}


def test_another_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, WAIT)
    with agent_for(plan, Start(plan=plan.to_json(), node_rank=0, version=99)) as agent:
        (failed,) = agent.rest()
    assert isinstance(failed, Failed)
    assert "install one dsrun on all hosts" in failed.reason
    assert job_processes(plan.job_id) == []


def test_an_interpreter_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    value = script_plan(tmp_path, WAIT).to_json()
    value["program"]["python"] = "/no/such/python"
    plan = LaunchPlan.from_json(value)
    with agent_for(plan) as agent:
        messages = agent.rest()
    assert "/no/such/python" in next(message.reason for message in messages if isinstance(message, Failed))
    assert isinstance(messages[-1], Finished)


def test_a_front_end_that_reads_slowly_slows_the_ranks_and_loses_nothing(tmp_path: Path) -> None:
    # 24 MB against 8 MB that the agent holds: it must stop reading, and go on when it is read.
    source = "import os\nfor _ in range(24): os.write(1, b'x' * 999_999 + b'\\n')\n"
    with agent_for(script_plan(tmp_path, source, ranks=1)) as agent:
        agent.until(Started)
        resident_kib = int(
            next(
                line.split()[1]
                for line in Path(f"/proc/{agent.process.pid}/status").read_text().splitlines()
                if line.startswith("VmHWM")
            )
        )
        outputs = [message.text for message in agent.rest() if isinstance(message, Output)]
    assert sum(map(len, outputs)) == 24_000_000
    assert resident_kib < 100_000


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
