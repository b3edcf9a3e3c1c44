"""Real jobs over several attempts and agents: restarts, hangs with their verdict, and hosts that meet."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from dsrun.launcher.plan.launch_plan import LaunchPlan, Outside
from dsrun.launcher.session.job_run import Policies
from dsrun.launcher.session.rank_table import Outcome
from support.jobs import RecordingSink, local_job, script_plan

pytestmark = pytest.mark.timeout(120)

#: Sums over all ranks by plain torch, and tells its place.
SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")]
print(place[0], place[1], int(os.environ["NODE_RANK"]) + 1, place[3], int(total), flush=True)
dist.destroy_process_group()
"""
#: Beats a few times, then rank 1 does something else and rank 0 waits for ever.
HANG = """
import ctypes, os, signal, threading, time
import dsrun
for step in range(5):
    dsrun.heartbeat(step, "forward")
    time.sleep(0.05)
def hang():
    {hang}
if os.environ["RANK"] == "1":
    hang()
threading.Event().wait()
"""


def run(plan: LaunchPlan, policies: Policies) -> tuple[Outcome, RecordingSink]:
    sink = RecordingSink()
    with local_job(plan, sink, policies) as job:
        return job.run(), sink


_A4 = pytest.mark.soak("row A4 in test_faults_hang.py, which has both at once")


@pytest.mark.depends_on_speed("a hang time-out of 3 s")
@pytest.mark.parametrize(
    ("hang", "said"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "rank 1 is stopped (SIGSTOP or a debugger)",
            id="stopped",
            marks=_A4,
        ),
        pytest.param(
            "ctypes.PyDLL(None).sleep(1000)  # Python's lock is held all the time",
            "rank 1 is in hang (train.py:8)",
            id="holds the GIL",
            marks=_A4,
        ),
        pytest.param("time.sleep(1000)", "rank 1 is in hang (train.py:8)", id="sleeps"),
    ],
)
def test_a_hang_is_found_and_blamed_on_the_rank_that_does_not_wait(tmp_path: Path, hang: str, said: str) -> None:
    plan = script_plan(tmp_path, HANG.format(hang=hang), start="fork", grace_s=2)
    outcome, _ = run(plan, Policies(hang_timeout_s=3.0, on_hang="stop"))
    assert outcome.exit_code == 76
    assert outcome.report is not None
    head, *details = outcome.report.render()
    assert said in head
    assert "rank 0 is in Event.wait (threading.py:" in head
    assert any("step 4, phase forward" in line for line in details)
    assert f"{plan.run_dir}/rank<N>.stacks.txt" in details[-1]
    assert "train.py" in Path(plan.run_dir, "rank0.stacks.txt").read_text()


#: torch from a disk that takes longer than the time-out; rank 0 beats, and waits for the other one.
SLOW_IMPORT = """
import os, sys, dsrun
if os.environ["RANK"] == "1":
    sys.path.insert(0, {folder!r})
    import torch
    print("has imported", torch.__file__, flush=True)
else:
    dsrun.heartbeat()
    os.read(os.open({pipe!r}, os.O_RDONLY), 1)
"""


@pytest.mark.depends_on_speed("a hang time-out of 1.5 s")
def test_a_rank_that_imports_torch_slowly_is_no_hang(tmp_path: Path) -> None:
    pipe = tmp_path / "imported"
    os.mkfifo(pipe)
    (tmp_path / "slow" / "torch").mkdir(parents=True)
    (tmp_path / "slow" / "torch" / "__init__.py").write_text(
        f"import time; time.sleep(3.5); open({str(pipe)!r}, 'w').write('x')"
    )
    source = SLOW_IMPORT.format(folder=str(tmp_path / "slow"), pipe=str(pipe))
    plan = script_plan(tmp_path, source, start="exec", grace_s=1)
    outcome, sink = run(plan, Policies(hang_timeout_s=1.5, on_hang="stop"))
    assert outcome.exit_code == 0, sink.notes


@pytest.mark.soak("row A12 in test_faults_hang.py")
@pytest.mark.depends_on_speed("a hang time-out of 3 s")
def test_a_rank_that_returned_early_is_named_when_the_others_wait_for_it(tmp_path: Path) -> None:
    source = HANG.format(hang="raise SystemExit(0)")
    outcome, _ = run(script_plan(tmp_path, source, grace_s=2), Policies(hang_timeout_s=3.0, on_hang="stop"))
    assert outcome.exit_code == 76
    assert outcome.report is not None
    assert "rank 1 has ended already, rank 0 is in Event.wait" in outcome.report.render()[0]


FAILS_TWICE = """
import json, os, pathlib
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "from", os.environ.get("DSRUN_RESUME"), os.environ["DSRUN_NONCE"])
run_dir = pathlib.Path(os.environ["DSRUN_RUN_DIR"])
if os.environ["RANK"] == "0" and attempt < 2:
    checkpoint = run_dir / f"step{attempt}"
    checkpoint.mkdir()
    (checkpoint / "index.json").write_text("{}")
    with open(run_dir / "records.jsonl", "a") as file:
        print(json.dumps({"event": "checkpoint", "time": attempt, "path": str(checkpoint)}), file=file)
    raise ValueError(f"attempt {attempt}")
"""


@pytest.mark.parametrize(
    "max_restarts", [1, pytest.param(2, marks=pytest.mark.soak("row A27 in test_faults_restart.py"))]
)
def test_a_script_that_fails_twice_is_started_as_often_as_allowed_and_resumes(
    tmp_path: Path, max_restarts: int
) -> None:
    plan = script_plan(tmp_path, FAILS_TWICE)
    outcome, sink = run(plan, Policies(max_restarts=max_restarts, first_wait_s=0.01))
    succeeds = max_restarts == 2
    assert (outcome.exit_code, outcome.attempts) == (0 if succeeds else 1, max_restarts + 1)
    lines = [text.split() for text in sink.texts(0) if text.startswith("attempt ")]
    assert [line[3] for line in lines] == ["None", *(f"{plan.run_dir}/step{n}" for n in range(max_restarts))]
    assert len({line[4] for line in lines}) == max_restarts + 1
    if not succeeds:
        # The error file of the attempt before does not speak for this one.
        assert outcome.report is not None
        assert "ValueError: attempt 1" in "\n".join(outcome.report.render())


MEET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(os.environ["RANK"], os.environ["NODE_RANK"], os.environ["LOCAL_RANK"], int(ones))
"""


def test_ranks_under_two_agents_meet_in_one_group(tmp_path: Path) -> None:
    outcome, sink = run(script_plan(tmp_path, MEET, ranks=1, hosts=2, start="fork"), Policies())
    assert outcome.exit_code == 0
    assert [sink.texts(rank)[-1] for rank in (0, 1)] == ["0 0 0 2", "1 1 0 2"]


def test_a_rank_killed_under_one_agent_ends_the_ranks_of_the_other(tmp_path: Path) -> None:
    source = (
        MEET + f"if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), {signal.SIGKILL})\ndist.all_reduce(ones)\n"
    )
    outcome, _ = run(script_plan(tmp_path, source, ranks=1, hosts=2, start="fork"), Policies())
    assert outcome.exit_code == 137
    assert outcome.report is not None
    head, *_, last = outcome.report.render()
    assert head.startswith("error: rank 1 on here2 (pid ")
    assert last in (
        "1 other rank failed after it, of the broken connection",
        "1 other rank was stopped after it",
    )
    assert [end.host for end in outcome.ends] == ["here", "here2"]
    assert os.path.exists(outcome.ends[1].log)


class SinkOfOneWhoWaits(RecordingSink):
    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def note(self, text: str) -> None:
        super().note(text)
        if "waiting for node 0" in text:
            self.waits.set()


def test_hosts_that_have_a_dsrun_of_their_own_find_together_though_host_0_is_late(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    plans: list[LaunchPlan] = []
    for node_rank in (0, 1):
        folder = tmp_path / f"node{node_rank}"
        folder.mkdir()
        outside = Outside(node_rank=node_rank, node_count=2, port=port, patience_s=60)
        plans.append(script_plan(folder, SUM, ranks=2, start="fork", outside=outside))
    early, late = SinkOfOneWhoWaits(), RecordingSink()
    with local_job(plans[0], late, Policies()) as first, local_job(plans[1], early, Policies()) as second:
        ends: list[Outcome] = []
        thread = threading.Thread(target=lambda: ends.append(second.run()))
        thread.start()
        assert early.waits.wait(60)
        assert first.run().exit_code == 0, late.notes
        thread.join(60)
    assert [outcome.exit_code for outcome in ends] == [0]
    assert [late.texts(rank) for rank in (0, 1)] == [["0 0 1 2 10"], ["1 1 1 2 10"]]
    assert [early.texts(rank) for rank in (2, 3)] == [["2 0 2 2 10"], ["3 1 2 2 10"]]
    assert sorted(path.name for path in Path(plans[1].run_dir).glob("*.log")) == ["rank2.log", "rank3.log"]


def test_a_host_that_never_comes_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    outside = Outside(node_rank=0, node_count=3, port=port, patience_s=0.2)
    outcome, sink = run(script_plan(tmp_path, "print('started')", outside=outside), Policies())
    assert outcome.exit_code == 74
    assert outcome.report is not None
    assert outcome.report.headline() == "host here: nodes 1, 2 of 3 did not come in time"
    assert sink.shown == []
