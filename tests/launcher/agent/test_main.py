"""The agent answers for every process of the job on its host, whatever its front end does."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from dsrun.contract.environment import CONFIG_ENV
from dsrun.contract.error_file import write_error_file
from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.agent.job_files import marked
from dsrun.launcher.agent.start.cgroup_scope import make_scope
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.isolated_command import isolated_command
from dsrun.launcher.machine.processor.rank_binding import read_bindings
from dsrun.launcher.plan.launch_plan import (
    DEFAULT_LEASE_S,
    GpuPlace,
    LaunchPlan,
    NodePlan,
    ProgramKind,
    StartMethod,
    WorkerSpec,
)
from dsrun.launcher.protocol import (
    Exit,
    Failed,
    Finished,
    FrameReader,
    GpuFindings,
    Hello,
    Kill,
    Lease,
    Listening,
    Meet,
    Message,
    Note,
    Output,
    Passed,
    Pulse,
    RankStack,
    RankTraceBytes,
    Records,
    Signal,
    Stacks,
    Start,
    Started,
    Stop,
    TakeStacks,
    encode,
)
from support.jobs import MOVES, program_plan, script_plan
from support.processes import job_processes, kill_left, wait_for_end, wait_until_gone

pytestmark = pytest.mark.timeout(120)
M = TypeVar("M")


class Agent:
    """A real agent with this test as its front end."""

    def __init__(
        self,
        plan: LaunchPlan,
        start: Start | None,
        *,
        node_rank: int,
        mark: str,
        config: str | None,
        group: Path | None,
    ) -> None:
        self.process = subprocess.Popen(
            isolated_command(sys.executable, "dsrun.launcher.agent.main", plan.job_id),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = FrameReader()
        self._messages: list[Message] = []
        if group is not None:
            # Before it hears of its job, at which it looks where it is.
            (group / "cgroup.procs").write_text(str(self.process.pid))
        if start is None:
            # No test says often that it lives; those that are about it set a lease of their own.
            lease_s = 600.0 if plan.lease_s == DEFAULT_LEASE_S else plan.lease_s
            value = replace(plan, lease_s=lease_s).to_json()
            start = Start(plan=value, node_rank=node_rank, mark=mark, config=config)
        self.send(start)

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

    def until_ready(self, ranks: int) -> list[int]:
        """Waits until that many ranks have said so, and returns their pids; a rank may be faster than their list."""
        ready: dict[int, str] = {}
        pids: list[int] = []
        while not pids or sum("ready" in text for text in ready.values()) < ranks:
            message = self.next()
            assert message is not None, "the agent ended before its ranks were ready"
            if isinstance(message, Started):
                pids = message.pids
            elif isinstance(message, Output):
                ready[message.rank] = ready.get(message.rank, "") + message.text
        return pids

    def rest(self) -> list[Message]:
        return list(iter(self.next, None))

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextmanager
def agent_for(
    plan: LaunchPlan,
    start: Start | None = None,
    *,
    node_rank: int = 0,
    apart: bool = False,
    config: str | None = None,
    group: Path | None = None,
) -> Generator[Agent]:
    """Runs an agent, in a control group; `apart` is one on a host that does not see the front end's folder."""
    with marked(plan.run_dir) as mark:
        agent = Agent(plan, start, node_rank=node_rank, mark="" if apart else mark, config=config, group=group)
        try:
            yield agent
            assert agent.process.wait(20) is not None
            assert wait_until_gone(plan.job_id) == []
            assert own_folders(plan.job_id) == []
        finally:
            kill_left(plan.job_id)
            agent.process.wait(10)
            for pipe in (agent.process.stdin, agent.process.stdout):
                assert pipe is not None
                pipe.close()


def own_folders(job_id: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"dsrun-{job_id}-*"))


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


@pytest.mark.depends_on_speed("2 s between the first end and the last")
def test_one_grace_holds_for_all_ranks_that_ignore_the_signal(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, STUBBORN, ranks=3, grace_s=2.0)) as agent:
        agent.until_ready(3)
        began_s = time.time()
        agent.send(Stop(signal=signal.SIGTERM))
        messages = agent.rest()
    assert statuses(messages) == {0: -9, 1: -9, 2: -9}
    ends_s = [message.time_s for message in messages if isinstance(message, Exit)]
    assert min(ends_s) - began_s >= 2.0
    assert max(ends_s) - min(ends_s) < 2.0


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
    # Whoever was first is the cause.
    assert failed.time_s <= min(message.time_s for message in messages if isinstance(message, Exit))


def test_a_stopped_spawner_does_not_keep_the_job_from_ending(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, WAIT)) as agent:
        agent.until_ready(2)
        (spawner,) = children(agent.process.pid)
        os.kill(spawner, signal.SIGSTOP)
        agent.send(Kill())
        assert isinstance(agent.rest()[-1], Finished)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_agent_itself_stops_the_job(tmp_path: Path, signum: int) -> None:
    with agent_for(script_plan(tmp_path, WAIT)) as agent:
        agent.until_ready(2)
        agent.process.send_signal(signum)
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


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_ranks_run_with_the_agents_interpreter_wherever_the_front_ends_is(tmp_path: Path, start: StartMethod) -> None:
    plan = script_plan(tmp_path, "import sys; print(sys.executable)", ranks=1, start=start).run_by("/no/such/python")
    with agent_for(plan) as agent:
        messages = agent.rest()
    assert statuses(messages) == {0: 0}
    assert "".join(message.text for message in messages if isinstance(message, Output)) == f"{sys.executable}\n"


#: Writes records as rank 0 does, the last of them only in part, and an error.
RECORDS = (
    "import os, stat, sys\n"
    "folder = os.environ['DSRUN_RUN_DIR']\n"
    "print(folder, oct(stat.S_IMODE(os.stat(folder).st_mode)))\n"
    "with open(folder + '/records.jsonl', 'a') as file:\n"
    '    file.write(\'{"step": 1}\\n{"step": 2}\\n{"step"\')\n'
    "raise ValueError('told')\n"
)


def test_on_a_host_apart_the_jobs_files_are_its_own_and_what_they_say_is_sent(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, RECORDS, ranks=1)
    with agent_for(plan, apart=True) as agent:
        assert agent.until(Hello).own_folder
        messages = agent.rest()
    folder, mode = "".join(m.text for m in messages if isinstance(m, Output) and m.stream == "stdout").split()
    assert (mode, Path(folder).parent) == ("0o700", Path(tempfile.gettempdir()))
    assert "".join(m.text for m in messages if isinstance(m, Records)) == '{"step": 1}\n{"step": 2}\n'
    error = next(m.error for m in messages if isinstance(m, Exit))
    assert error is not None
    assert error.message == "ValueError: told"
    assert list(Path(plan.run_dir).iterdir()) == []


def test_on_a_host_apart_profiles_are_sent_whole(tmp_path: Path) -> None:
    source = (
        "import os\n"
        "for rank, byte in ((0, b'a'), (12, b'b')):\n"
        "    with open(os.environ['DSRUN_RUN_DIR'] + f'/rank{rank}.trace.json.gz', 'wb') as file:\n"
        "        file.write(byte * (5 + (1 << 20) * (rank == 0)))\n"
    )
    with agent_for(script_plan(tmp_path, source, ranks=1), apart=True) as agent:
        messages = agent.rest()
    pieces = [message for message in messages if isinstance(message, RankTraceBytes)]
    assert [(each.rank, each.offset, each.is_last) for each in pieces] == [
        (0, 0, False),
        (0, 1 << 20, True),
        (12, 0, True),
    ]
    data = [base64.b64decode(each.data) for each in pieces]
    assert data == [b"a" * (1 << 20), b"a" * 5, b"b" * 5]


def test_a_host_that_shares_the_jobs_folder_writes_there_and_sends_no_records(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, RECORDS, ranks=1)
    with agent_for(plan) as agent:
        assert not agent.until(Hello).own_folder
        messages = agent.rest()
    assert not any(isinstance(message, Records) for message in messages)
    assert JobPaths(Path(plan.run_dir)).records.read_text() == '{"step": 1}\n{"step": 2}\n{"step"'


@pytest.mark.parametrize("apart", [True, False])
def test_a_host_apart_gets_the_config_that_was_checked_and_others_read_it_where_it_is(
    tmp_path: Path, apart: bool
) -> None:
    source = "import os; path = os.environ['DSRUN_CONFIG']; print(path, oct(os.stat(path).st_mode), open(path).read())"
    (tmp_path / "ds.json").write_text("here")
    plan = script_plan(tmp_path, source, ranks=1, env={CONFIG_ENV: str(tmp_path / "ds.json")})
    with agent_for(plan, apart=apart, config="checked") as agent:
        messages = agent.rest()
    path, mode, text = "".join(message.text for message in messages if isinstance(message, Output)).split()
    assert Path(path).name == "ds.json"
    assert text == ("checked" if apart else "here")
    assert (Path(path) == tmp_path / "ds.json") is not apart
    assert not apart or mode == "0o100600"


def test_records_are_sent_while_the_rank_runs(tmp_path: Path) -> None:
    source = "import os\nopen(os.environ['DSRUN_RUN_DIR'] + '/records.jsonl', 'w').write('{}\\n')\n" + WAIT
    with agent_for(script_plan(tmp_path, source, ranks=1), apart=True) as agent:
        assert agent.until(Records).text == "{}\n"
        agent.send(Kill())
        assert isinstance(agent.rest()[-1], Finished)


def test_a_killed_agents_own_folder_is_removed_by_the_spawner(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, WAIT, ranks=1)
    with agent_for(plan, apart=True) as agent:
        agent.until_ready(1)
        (spawner,) = children(agent.process.pid)
        assert len(own_folders(plan.job_id)) == 1
        agent.process.kill()
        assert wait_for_end(spawner, timeout_s=20)


@pytest.mark.parametrize("what", ["folder", "script"])
def test_what_is_missing_here_is_told_once_and_no_rank_starts(tmp_path: Path, what: str) -> None:
    plan = script_plan(tmp_path, WAIT)
    missing = tmp_path / "gone"
    program = replace(plan.program, target=str(missing)) if what == "script" else plan.program
    plan = replace(plan, program=program, cwd=str(missing) if what == "folder" else plan.cwd)
    with agent_for(plan) as agent:
        messages = agent.rest()
    (failed,) = (message for message in messages if isinstance(message, Failed))
    assert str(missing) in failed.reason
    assert failed.is_mistake
    assert isinstance(messages[-1], Finished)
    assert not any(isinstance(message, Listening | Started) for message in messages)


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


RAISES_AND_STAYS = """
import atexit, os, threading
if os.environ["RANK"] == "1":
    atexit.register(threading.Event().wait)
    raise ValueError("boom")
print("ready")
threading.Event().wait()
"""


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_rank_that_raised_and_does_not_end_is_ended_and_fails_of_its_own_error(
    tmp_path: Path, start: StartMethod
) -> None:
    with agent_for(script_plan(tmp_path, RAISES_AND_STAYS, start=start, grace_s=0.5)) as agent:
        ended = agent.until(Exit)
        agent.send(Kill())
        assert statuses(agent.rest()) == {0: -9}
    assert (ended.rank, ended.status) == (1, 1)
    assert ended.error is not None
    assert ended.error.message == "ValueError: boom"
    assert 'raise ValueError("boom")' in ended.error.traceback


def test_a_rank_whose_fork_fails_goes_on(tmp_path: Path) -> None:
    # The fork leaves the script by the same way as the rank would, and so leaves a word.
    source = "import os\nif os.fork() == 0: raise ValueError('of the fork')\nos.wait()\n" + WAIT
    plan = script_plan(tmp_path, source, ranks=1, grace_s=0.0)
    with agent_for(plan) as agent:
        agent.until_ready(1)
        assert JobPaths(Path(plan.run_dir)).error_file(0).exists()
        for _ in range(3):
            agent.until(Pulse)
        agent.send(Kill())
        assert statuses(agent.rest()) == {0: -9}


# --- several hosts


def on_hosts(plan: LaunchPlan, *slots: int) -> LaunchPlan:
    """The same job, as if this machine were several."""
    nodes: list[NodePlan] = []
    for node_rank, count in enumerate(slots):
        first = sum(slots[:node_rank])
        workers = tuple(WorkerSpec(rank=first + local, local_rank=local, env={}) for local in range(count))
        nodes.append(
            NodePlan(node_rank=node_rank, host=HostSpec(name=f"n{node_rank}", slots=count, source=""), workers=workers)
        )
    return replace(plan, nodes=tuple(nodes))


ALL_REDUCE = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
sys.stdout.write("%s %s of %s: %s %s\\n" % (
    os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], total.item(),
    store.get("dsrun/nonce").decode(),
))
dist.destroy_process_group()
"""


def test_ranks_of_uneven_hosts_know_their_place_and_meet_in_the_jobs_own_store(tmp_path: Path) -> None:
    plan = on_hosts(script_plan(tmp_path, ALL_REDUCE, start="fork"), 1, 2)
    with agent_for(plan) as first, agent_for(plan, node_rank=1) as second:
        listening = first.until(Listening)
        assert listening.address == "127.0.0.1"
        second.send(Meet(address=listening.address, port=listening.port))
        texts = [message.text for agent in (first, second) for message in agent.rest() if isinstance(message, Output)]
    lines = sorted(line for line in "".join(texts).splitlines() if " of " in line)
    assert lines == [f"{place}: 6.0 {plan.nonce}" for place in ("0 0 of 1", "1 0 of 2", "2 1 of 2")]


def test_hosts_but_the_first_start_nothing_before_they_know_where_to_meet(tmp_path: Path) -> None:
    with agent_for(on_hosts(script_plan(tmp_path, WAIT), 1, 1), node_rank=1) as agent:
        assert isinstance(agent.next(), Hello)
        assert agent.until(Pulse).ranks == []
        assert children(agent.process.pid) == []
        agent.send(Stop(signal=signal.SIGTERM))
        agent.send(Meet(address="127.0.0.1", port=1))
        messages = agent.rest()
    assert isinstance(messages[-1], Finished)
    assert not any(isinstance(message, Started | Failed) for message in messages)


def test_an_address_that_is_not_this_hosts_is_an_error_that_names_it(tmp_path: Path) -> None:
    # TEST-NET-1: nobody has it.
    with agent_for(replace(script_plan(tmp_path, WAIT), master_addr="192.0.2.1")) as agent:
        failed = agent.until(Failed)
        assert isinstance(agent.rest()[-1], Finished)
    assert failed.reason.startswith("cannot listen on 192.0.2.1 for the ranks to meet: cannot assign requested address")


# --- signs of life


def test_ranks_are_asked_once_the_front_end_has_been_silent_for_the_lease(tmp_path: Path) -> None:
    said = tmp_path / "asked"
    source = f"import signal, sys\nsignal.signal(15, lambda *_: (open({str(said)!r}, 'a').write('x'), sys.exit(0)))\n"
    with agent_for(replace(script_plan(tmp_path, source + WAIT), lease_s=4.0)) as agent:
        text, pulses = "", 0
        # Longer than the lease in all, so that it must have been renewed.
        while text.count("ready") < 2 or pulses < 5:
            message = agent.next()
            agent.send(Lease())
            pulses += isinstance(message, Pulse)
            text += message.text if isinstance(message, Output) else ""
        assert not said.exists()
        assert agent.process.wait(30) == 0
    assert said.read_text() == "xx"


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_pulse_tells_what_ranks_say_and_use(tmp_path: Path, start: StartMethod) -> None:
    source = "import os\nif os.environ['RANK'] == '1':\n    import dsrun; dsrun.heartbeat(step=3, phase='evaluate')\n"
    with agent_for(script_plan(tmp_path, source + WAIT, start=start)) as agent:
        agent.until_ready(2)
        agent.until(Pulse)
        silent, beating = agent.until(Pulse).ranks
        agent.send(Kill())
        ended = {message.rank: message for message in (agent.until(Exit), agent.until(Exit))}
    assert (silent.rank, silent.beats, silent.step, silent.idle_s, silent.phase) == (0, 0, None, None, "")
    assert [(ended[rank].step, ended[rank].phase) for rank in (0, 1)] == [(None, ""), (3, "evaluate")]
    assert (beating.rank, beating.beats, beating.step, beating.phase) == (1, 1, 3, "evaluate")
    assert beating.idle_s is not None
    assert min(silent.rss_bytes, beating.rss_bytes) > 5 << 20


# --- signals for the ranks alone


CATCHER = """
import os, signal, subprocess, sys
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"saved\\n"))
    # In the rank's own process group, and would die of the signal.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
"""


def test_a_passed_signal_reaches_ranks_that_catch_it_and_harms_nobody(tmp_path: Path) -> None:
    source = CATCHER + WAIT.replace("threading.Event().wait()", "while True: threading.Event().wait(1)")
    with agent_for(script_plan(tmp_path, source)) as agent:
        agent.until_ready(2)
        spared = job_processes_below(agent)
        agent.send(Signal(signal=signal.SIGUSR1))
        assert agent.until(Passed) == Passed(signal=signal.SIGUSR1, ranks=[0], spared=[1])
        saved = ""
        while "saved" not in saved:
            saved += agent.until(Output).text
        assert job_processes_below(agent) == spared
        agent.send(Kill())


# --- where ranks are


STUCK = """
import ctypes, os, threading
def wait_for_ever():
    print("ready", flush=True)
    threading.Event().wait()
def hold_the_gil():
    libc = ctypes.PyDLL(None)
    print("ready", flush=True)
    while True:
        libc.sleep(1000)
import dsrun
dsrun.heartbeat(step=7, phase="forward")
hold_the_gil() if os.environ["RANK"] == "1" else wait_for_ever()
"""


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_stacks_come_from_all_ranks_that_can_answer_and_a_state_from_those_that_cannot(
    tmp_path: Path, start: StartMethod
) -> None:
    plan = script_plan(tmp_path, STUCK, ranks=3, start=start)
    with agent_for(plan) as agent:
        pids = agent.until_ready(3)
        os.kill(pids[2], signal.SIGSTOP)
        wait_for_state(pids[2], "T")
        for pid in pids[:2]:
            wait_for_state(pid, "S")  # they say that they are ready before they sleep
        waiting, holding, stopped = take_stacks(agent)
        again = take_stacks(agent)
        agent.send(Kill())
    assert 'train.py", line 5 in wait_for_ever' in waiting.text
    assert 'train.py", line 10 in hold_the_gil' in holding.text
    assert (waiting.state, stopped.state, stopped.text) == ("S", "T", "")
    for stack in (waiting, holding, stopped):
        assert (stack.step, stack.phase, stack.collective) == (7, "forward", "")
        assert stack.idle_s is not None
    # Each answer is of its own moment, though the file holds them all.
    assert again[0].text.count("wait_for_ever") == 1
    assert (Path(plan.run_dir) / "rank0.stacks.txt").stat().st_mode & 0o777 == 0o600


def test_a_rank_whose_threads_move_lives_on_when_asked_for_stacks(tmp_path: Path) -> None:
    with agent_for(script_plan(tmp_path, MOVES + WAIT, ranks=1)) as agent:
        agent.until_ready(1)
        for _ in range(10):
            (stack,) = take_stacks(agent)
            assert " in down\n" in stack.text
            assert "in write_stacks_when_asked\n" in stack.text, "it has the GIL"
        agent.send(Kill())
        agent.rest()
    assert [path.name for path in tmp_path.rglob("*.pipe")] == []


def test_a_program_that_is_no_python_is_not_asked_for_stacks(tmp_path: Path) -> None:
    with agent_for(program_plan(tmp_path, "command", "sleep", "1000", ranks=1)) as agent:
        agent.until(Started)
        (stack,) = take_stacks(agent)
        agent.send(Stop(signal=signal.SIGTERM))
        assert statuses(agent.rest()) == {0: -15}
    assert (stack.text, stack.idle_s, stack.step) == ("", None, None)


def test_a_planted_link_is_not_followed_for_stacks(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, WAIT, ranks=1)
    (tmp_path / "precious").write_text("precious")
    (Path(plan.run_dir) / "rank0.stacks.txt").symlink_to(tmp_path / "precious")
    with agent_for(plan) as agent:
        agent.until_ready(1)
        (stack,) = take_stacks(agent)
        agent.send(Kill())
    assert stack.text == ""
    assert (tmp_path / "precious").read_text() == "precious"


def take_stacks(agent: Agent) -> list[RankStack]:
    agent.send(TakeStacks())
    return agent.until(Stacks).ranks


# --- the kernel's part


def test_the_job_has_a_control_group_of_its_own_where_one_may_be_made(tmp_path: Path) -> None:
    probe = make_scope(f"dsrun-test-{os.getpid()}")
    if probe is None:
        pytest.skip("no cgroup v2 in which this user may make a group")
    probe.remove()
    plan = script_plan(tmp_path, WAIT, ranks=1)
    with agent_for(plan) as agent:
        (pid,) = agent.until(Started).pids
        assert f"/dsrun-{plan.job_id}-0\n" in Path(f"/proc/{pid}/cgroup").read_text()
        agent.send(Kill())
        assert statuses(agent.rest()) == {0: -9}
    assert not (probe.folder.parent / f"dsrun-{plan.job_id}-0").exists()


def test_a_killed_agent_leaves_no_control_group(tmp_path: Path) -> None:
    probe = make_scope(f"dsrun-test-{os.getpid()}")
    if probe is None:
        pytest.skip("no cgroup v2 in which this user may make a group")
    probe.remove()
    plan = script_plan(tmp_path, WAIT, ranks=1)
    with agent_for(plan) as agent:
        agent.until_ready(1)
        agent.process.kill()
    assert not (probe.folder.parent / f"dsrun-{plan.job_id}-0").exists()


@contextmanager
def memory_group(limit_bytes: int) -> Generator[Path]:
    """A real group of cgroup v1 below this process's own, with a limit."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    folder = Path("/sys/fs/cgroup/memory", (own or "").lstrip("/"), f"dsrun-test-{os.getpid()}")
    if own is None or not os.access(folder.parent / "cgroup.procs", os.W_OK):
        pytest.skip("no memory cgroup (v1) in which this user may make a group")
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield folder
    finally:
        folder.rmdir()


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_told_from_one_that_somebody_killed(tmp_path: Path) -> None:
    source = (
        "import os, signal, time\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r} + os.environ['RANK']): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '0' else b'x' * (1 << 30)\n"
    )
    with memory_group(256 << 20) as group, agent_for(script_plan(tmp_path, source), group=group) as agent:
        agent.until_ready(2)
        (tmp_path / "go0").touch()
        killed = agent.until(Exit)
        (tmp_path / "go1").touch()
        starved = agent.until(Exit)
        agent.rest()
        agent.process.wait(20)
    assert (killed.rank, killed.status, killed.oom) == (0, -9, None)
    assert (starved.rank, starved.status) == (1, -9)
    assert starved.oom is not None
    assert (starved.oom.by, starved.oom.limit_bytes) == ("limit", 256 << 20)
    assert starved.oom.group.endswith(group.name)


def test_a_rank_that_dies_of_its_gpu_has_the_driver_asked_before_the_agent_ends(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, "raise RuntimeError('CUDA error: unspecified launch failure')\n", ranks=1)
    (node,) = plan.nodes
    card = GpuPlace(uuid="GPU-none-of-this-machine", address="00ff:1b:00.0")
    with agent_for(replace(plan, nodes=(replace(node, gpus=(card,)),))) as agent:
        messages = agent.rest()
    (told,) = [message for message in messages if isinstance(message, GpuFindings)]
    (finding,) = [gpu for gpu in told.gpus if gpu.ranks]
    assert (told.rank, finding.uuid, finding.address, finding.ranks) == (0, card.uuid, card.address, [0])
    # Whatever this machine has, it has no such card.
    assert len(finding.faults) == 1
    assert isinstance(messages[-1], Finished)


#: Says which GPUs a rank may see, and how CUDA counts them; no interpreter is started for it.
SEES: tuple[ProgramKind, str, str, str] = (
    *("command", "sh", "-c"),
    'echo "$RANK: $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER"',
)


def with_gpus_of_a_scheduler(plan: LaunchPlan, *, chosen: tuple[int, ...]) -> LaunchPlan:
    (node,) = plan.nodes
    return replace(plan, nodes=(replace(node, chosen=chosen, host=replace(node.host, source="hosts:1")),))


def test_chosen_gpus_count_those_that_the_scheduler_of_the_host_has_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    plan = with_gpus_of_a_scheduler(program_plan(tmp_path, *SEES, ranks=1), chosen=(0,))
    with agent_for(plan) as agent:
        said = [message.text for message in agent.rest() if isinstance(message, Output)]
    assert "".join(said) == "0: 2 PCI_BUS_ID\n"


def test_each_rank_of_a_host_whose_scheduler_named_slices_sees_one_and_a_note_says_what_that_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    with agent_for(program_plan(tmp_path, *SEES, ranks=2)) as agent:
        messages = agent.rest()
    said = sorted(message.text for message in messages if isinstance(message, Output))
    assert "".join(said) == "0: MIG-a PCI_BUS_ID\n1: MIG-b PCI_BUS_ID\n"
    assert any(isinstance(message, Note) and message.text.startswith("2 MIG slices") for message in messages)


def test_a_chosen_gpu_that_the_host_does_not_show_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with agent_for(with_gpus_of_a_scheduler(program_plan(tmp_path, *SEES, ranks=1), chosen=(2,))) as agent:
        (failed,) = [message for message in agent.rest() if isinstance(message, Failed)]
    assert (failed.is_mistake, failed.hint is not None) == (True, True)
    assert failed.reason.startswith("hosts:1: GPU 2 of host")


def test_ranks_run_on_the_cores_that_the_binding_gives_them(tmp_path: Path) -> None:
    source = "import os\nprint(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
    plan = replace(script_plan(tmp_path, source, env={}), bind="cores")
    given = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with agent_for(plan) as agent:
        messages = agent.rest()
    for rank, binding in enumerate(read_bindings("cores", [given] * 2)):
        cpus = sorted(os.sched_getaffinity(0)) if binding.cpus is None else list(binding.cpus)
        said = "".join(message.text for message in messages if isinstance(message, Output) and message.rank == rank)
        assert said == f"{cpus} {os.environ.get('OMP_NUM_THREADS', binding.threads)}\n"


def test_the_word_of_an_earlier_attempt_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, "import os; os._exit(5)\n", ranks=1)
    write_error_file(JobPaths(Path(plan.run_dir)).error_file(0), ValueError("of the first attempt"))
    with agent_for(replace(plan, attempt=1, max_restarts=3)) as agent:
        end = agent.until(Exit)
        agent.rest()
    assert (end.status, end.error) == (5, None)


def wait_for_state(pid: int, letter: str) -> None:
    deadline_s = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != letter:
        assert time.monotonic() < deadline_s, f"process {pid} is never in state {letter}"
        time.sleep(0.01)


def job_processes_below(agent: Agent) -> list[int]:
    """All processes below an agent that have not ended."""
    found: list[int] = []
    for pid in children(agent.process.pid):
        found += [pid, *(grandchild for child in children(pid) for grandchild in [child, *children(child)])]
    return sorted(found)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
