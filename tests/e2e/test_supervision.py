"""A real job on this machine: whatever happens to its processes, it ends, says why, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsrun.launcher.plan.launch_plan import LaunchPlan, StartMethod
from dsrun.launcher.session.rank_table import Outcome
from support.jobs import RecordingSink, local_session, program_plan, script_plan
from support.processes import job_processes, kill_left, wait_for_end, wait_until_gone

pytestmark = pytest.mark.timeout(60)

#: Says its pid in one write and waits for ever.
WAIT = "import os, sys, threading\nsys.stdout.write(f'ready {os.getpid()}\\n')\nthreading.Event().wait()\n"


#: What is forked goes through the command line in test_faults_process.py.
both_starts = pytest.mark.parametrize(
    "start", ["exec", pytest.param("fork", marks=pytest.mark.soak("rows A1 to A7 in test_faults_process.py, forked"))]
)


class WhenReady:
    """Does something on the session's thread once every rank has said that it is ready."""

    def __init__(self, ranks: int, act: Callable[[dict[int, int]], None]) -> None:
        self.pids: dict[int, int] = {}
        self._ranks = ranks
        self._act = act

    def __call__(self, rank: int, text: str) -> None:
        if text.startswith("ready "):
            self.pids[rank] = int(text.split()[1])
            if len(self.pids) == self._ranks:
                self._act(self.pids)


def run(plan: LaunchPlan, sink: RecordingSink) -> Outcome:
    with local_session(plan, sink) as session:
        return session.run()


def agent_of(job_id: str) -> int:
    """The agent is the one process of the job that only its command line tells."""
    (agent,) = (
        pid
        for pid in job_processes(job_id)
        if b"dsrun.launcher.agent.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return agent


@both_starts
def test_the_rank_that_exits_3_is_blamed_and_gives_the_exit_code(tmp_path: Path, start: StartMethod) -> None:
    source = "import os\nif os.environ['RANK'] == '1':\n    print('giving up')\n    raise SystemExit(3)\n" + WAIT
    outcome = run(script_plan(tmp_path, source, ranks=3, start=start), RecordingSink())
    assert outcome.exit_code == 3
    assert outcome.report is not None
    lines = outcome.report.render()
    assert lines[0].startswith("error: rank 1 on here (pid ")
    assert lines[0].endswith("exited with code 3")
    assert "  | giving up" in lines
    assert lines[-1] == "2 other ranks were stopped after it"


@both_starts
def test_a_killed_rank_is_named_with_137_and_the_others_end(tmp_path: Path, start: StartMethod) -> None:
    sink = RecordingSink(WhenReady(2, lambda pids: os.kill(pids[1], signal.SIGKILL)))
    outcome = run(script_plan(tmp_path, WAIT, start=start), sink)
    assert outcome.exit_code == 137
    assert outcome.report is not None
    lines = outcome.report.render()
    assert "rank 1" in lines[0]
    assert "was killed by SIGKILL" in lines[0]
    assert any("no kill for want of memory" in line for line in lines)
    assert [end.status for end in outcome.ends] == [-15, -9]


#: A child, and a grandchild that left the rank's session: neither has a parent-death signal.
WITH_CHILDREN = (
    "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
    "import os\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        import time; time.sleep(1000)\n"
    "    os._exit(0)\n"
) + WAIT


@both_starts
def test_a_killed_agent_is_reported_and_leaves_nothing_behind(tmp_path: Path, start: StartMethod) -> None:
    plan = script_plan(tmp_path, WITH_CHILDREN, start=start)
    sink = RecordingSink(WhenReady(2, lambda pids: os.kill(agent_of(plan.job_id), signal.SIGKILL)))
    outcome = run(plan, sink)
    assert outcome.exit_code == 74
    assert outcome.report is not None
    assert outcome.report.render()[0] == "error: host here: the agent was killed by SIGKILL unexpectedly"


def test_an_agent_killed_when_only_detached_processes_are_left_takes_them_along(tmp_path: Path) -> None:
    # They ignore SIGTERM, so that the agent waits for the end of the grace when it is killed.
    stubborn = "import os, signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    detached = "import os, time\nos.write(1, b'ready %d\\n' % os.getpid())\ntime.sleep(1000)\n"
    source = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {detached!r}], start_new_session=True)\n"
    plan = script_plan(tmp_path, stubborn + source, ranks=1, grace_s=1000)
    sink = RecordingSink(WhenReady(1, lambda pids: os.kill(agent_of(plan.job_id), signal.SIGKILL)))
    assert run(plan, sink).exit_code == 74


@both_starts
def test_a_killed_spawner_is_the_cause_and_not_the_ranks_that_die_with_it(tmp_path: Path, start: StartMethod) -> None:
    plan = script_plan(tmp_path, WITH_CHILDREN, start=start)

    def kill_spawner(pids: dict[int, int]) -> None:
        # Parent of a rank: field 4 of its stat, the second after the name in brackets.
        stat = Path(f"/proc/{pids[0]}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)

    outcome = run(plan, RecordingSink(WhenReady(2, kill_spawner)))
    assert outcome.exit_code == 74
    assert outcome.report is not None
    reason = "the spawner was killed by SIGKILL before its ranks ended"
    assert outcome.report.render()[0] == f"error: host here: {reason}"
    assert [end.status for end in outcome.ends] == [-9, -9]


FRONT_END = """
import json, sys
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import LaunchPlan
from dsrun.launcher.session.agents import Session
from dsrun.launcher.transport.local import LocalTransport
class Sink:
    def lines(self, rank, stream, texts): print(*texts, sep="\\n", flush=True)
    def note(self, text): pass
plan = LaunchPlan.from_json(json.load(sys.stdin))
Session(plan, LocalTransport(), JobOutput(plan, Sink()), python=sys.executable).run()
"""


@both_starts
def test_a_killed_front_end_leaves_nothing_behind(tmp_path: Path, start: StartMethod) -> None:
    plan = script_plan(tmp_path, WITH_CHILDREN, start=start)
    with subprocess.Popen(
        [sys.executable, "-c", FRONT_END], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as front_end:
        try:
            assert front_end.stdin is not None
            assert front_end.stdout is not None
            front_end.stdin.write(json.dumps(plan.to_json()).encode())
            front_end.stdin.close()
            assert [front_end.stdout.readline().split()[0] for _ in range(2)] == [b"ready"] * 2
            assert job_processes(plan.job_id)
            front_end.kill()
            front_end.wait(10)
            assert wait_until_gone(plan.job_id) == []
        finally:
            front_end.kill()
            kill_left(plan.job_id)


@pytest.mark.depends_on_speed("4 s from the kill to the end")
def test_ranks_that_ignore_sigterm_are_killed_when_one_grace_is_over(tmp_path: Path) -> None:
    source = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    asked_s: list[float] = []

    def kill_one(pids: dict[int, int]) -> None:
        asked_s.append(time.monotonic())
        os.kill(pids[0], signal.SIGKILL)

    outcome = run(script_plan(tmp_path, source, ranks=4, grace_s=1.0), RecordingSink(WhenReady(4, kill_one)))
    assert 1.0 <= time.monotonic() - asked_s[0] < 4.0
    assert outcome.exit_code == 137
    assert [end.status for end in outcome.ends] == [-9] * 4
    assert outcome.report is not None
    assert "rank 0" in outcome.report.render()[0]


def test_detached_grandchildren_end_with_the_job(tmp_path: Path) -> None:
    # The script itself ends well; local_session checks that nothing is left.
    outcome = run(script_plan(tmp_path, WITH_CHILDREN.replace("threading.Event().wait()", "")), RecordingSink())
    assert outcome.exit_code == 0


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak("row A6 in test_faults_stop.py"))],
)
def test_the_users_stop_reaches_the_ranks_and_they_may_save(tmp_path: Path, signum: int, code: int) -> None:
    source = (
        "import os, signal, sys\n"
        "def save(signum, frame):\n"
        "    print(f'saved on {signum}')\n"
        "    sys.exit(0)\n"
        f"signal.signal({int(signum)}, save)\n"
    ) + WAIT
    plan, sink = script_plan(tmp_path, source), RecordingSink()
    with local_session(plan, sink) as session:
        sink.act_on_lines(WhenReady(2, lambda pids: session.requests.request_stop(signum)))
        outcome = session.run()
    assert (outcome.exit_code, outcome.report) == (code, None)
    assert [sink.texts(rank)[-1] for rank in (0, 1)] == [f"saved on {int(signum)}"] * 2


def test_a_second_stop_kills_ranks_that_do_not_end(tmp_path: Path) -> None:
    source = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAIT
    plan, sink = script_plan(tmp_path, source, grace_s=1000), RecordingSink()

    with local_session(plan, sink) as session:

        def stop_twice(_: dict[int, int]) -> None:
            session.requests.request_stop(signal.SIGINT)
            session.requests.request_stop(signal.SIGINT)

        sink.act_on_lines(WhenReady(2, stop_twice))
        outcome = session.run()
    assert outcome.exit_code == 130
    assert [end.status for end in outcome.ends] == [-9, -9]


def test_a_third_stop_leaves_and_the_agent_finishes_the_kill(tmp_path: Path) -> None:
    plan, sink = script_plan(tmp_path, WAIT, grace_s=1000), RecordingSink()
    with local_session(plan, sink) as session:

        def stop_thrice(_: dict[int, int]) -> None:
            for _ in range(3):
                session.requests.request_stop(signal.SIGINT)

        sink.act_on_lines(WhenReady(2, stop_thrice))
        assert session.run().exit_code == 130


def test_a_mistake_found_on_every_rank_is_shown_as_one_error(tmp_path: Path) -> None:
    source = (
        "print('half', end='')\n"
        "from dsrun.errors import ModelError\nraise ModelError('model: nothing to train', hint='unfreeze something')\n"
    )
    sink = RecordingSink()
    outcome = run(script_plan(tmp_path, source), sink)
    assert outcome.exit_code == 2
    assert outcome.report is not None
    assert outcome.report.render() == ["error: model: nothing to train", "hint: unfreeze something"]
    assert {text for _, _, text in sink.shown} == {"half"}
    assert sink.notes == []
    log = Path(outcome.ends[0].log).read_text()
    assert outcome.ends[0].status in (2, -15)
    assert log == "half\nerror: model: nothing to train\nhint: unfreeze something\n" or outcome.ends[0].status != 2


@pytest.mark.parametrize(
    "start", ["exec", pytest.param("fork", marks=pytest.mark.soak("the other start, and five megabytes of lines"))]
)
def test_every_byte_of_awkward_output_is_in_the_file(tmp_path: Path, start: StartMethod) -> None:
    raw = b"half " + b"line\n" + b"10%\r50%\r100%\n" + b"nul \0\n" + b"bad \xff\xc3\n" + b"x" * 3_000_000 + b"\nno end"
    (tmp_path / "raw").write_bytes(raw)
    source = (
        "import os, sys\n"
        "raw = open('raw', 'rb').read()\n"
        "sys.stdout.write('half '); os.write(1, raw[5:1000]); sys.stdout.buffer.write(raw[1000:])\n"
    )
    sink = RecordingSink()
    outcome = run(script_plan(tmp_path, source, start=start), sink)
    assert outcome.exit_code == 0
    for end in outcome.ends:
        assert Path(end.log).read_bytes() == raw
    texts = sink.texts(1)
    assert texts[:4] == ["half line", "100%", "nul \0", "bad \udcff\udcc3"]
    assert texts[-1] == "no end"
    assert len(texts) == 8
    assert max(map(len, texts)) <= (1 << 20) + 20


def test_five_megabytes_of_lines_from_each_rank_arrive_whole_and_in_order(tmp_path: Path) -> None:
    count = 50_000
    source = f"import os, sys\nfor n in range({count}): print(os.environ['RANK'], n, 'x' * 90)\n"
    sink = RecordingSink()
    outcome = run(script_plan(tmp_path, source), sink)
    assert outcome.exit_code == 0
    for rank in (0, 1):
        expected = [f"{rank} {number} {'x' * 90}" for number in range(count)]
        assert sink.texts(rank) == expected
        assert Path(outcome.ends[rank].log).read_text().splitlines() == expected


ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
value = torch.tensor([float(sys.argv[1]) + dist.get_rank()])
dist.all_reduce(value)
sys.stdout.write(f"sum {value.item():g} port {os.environ['MASTER_PORT']}")
dist.destroy_process_group()
"""


@pytest.mark.soak("A22 in test_faults_environment.py, where both are forked")
def test_two_jobs_at_once_one_forked_one_executed_meet_among_themselves(tmp_path: Path) -> None:
    plans = [
        script_plan(tmp_path, ALL_REDUCE, "10", start="fork"),
        script_plan(tmp_path, ALL_REDUCE, "200", start="exec"),
    ]
    sinks = [RecordingSink(), RecordingSink()]
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda plan=plan, sink=sink: outcomes.append(run(plan, sink)))
        for plan, sink in zip(plans, sinks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    words = [[sink.texts(rank)[-1].split() for rank in (0, 1)] for sink in sinks]
    assert [[rank[1] for rank in job] for job in words] == [["21", "21"], ["401", "401"]]
    assert words[0][0][3] != words[1][0][3]


def test_a_torchrun_script_with_record_reports_its_own_error(tmp_path: Path) -> None:
    source = """
import os
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    assert dist.is_torchelastic_launched() and dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 2
    dist.barrier()
    if dist.get_rank() == 1:
        raise RuntimeError("loss is NaN")
    dist.barrier()

main()
"""
    outcome = run(script_plan(tmp_path, source, start="fork"), RecordingSink())
    assert outcome.exit_code == 1
    assert outcome.report is not None
    assert outcome.report.cause == outcome.ends[1]
    assert any("loss is NaN" in line for line in outcome.report.render()[1:3])


def test_a_command_that_is_no_python_runs_as_it_stands(tmp_path: Path) -> None:
    plan = program_plan(tmp_path, "command", "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0 $1"', "a  b", "$(x);`y`")
    sink = RecordingSink()
    assert run(plan, sink).exit_code == 0
    assert [sink.texts(rank) for rank in (0, 1)] == [["0 of 2: a  b $(x);`y`"], ["1 of 2: a  b $(x);`y`"]]


def test_arguments_arrive_byte_for_byte(tmp_path: Path) -> None:
    awkward = ["", "a b", "'\"", "$X;`y`", "line\nbreak", "zwölf", "\udcff\udc80", "--", "-x"]
    source = "import sys\nprint(ascii(sys.argv[1:]))\n"
    for start in ("exec", "fork"):
        sink = RecordingSink()
        plan = script_plan(tmp_path, source, *awkward, ranks=1, start=start)
        assert run(plan, sink).exit_code == 0
        assert sink.texts(0) == [ascii(awkward)]


def test_ending_one_job_leaves_another_of_the_same_user_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        sink = RecordingSink(WhenReady(2, lambda pids: os.kill(pids[0], signal.SIGKILL)))
        run(script_plan(tmp_path, WAIT), sink)
        assert not wait_for_end(other.pid, timeout_s=0)
    finally:
        other.kill()
        other.wait()
