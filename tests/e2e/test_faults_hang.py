"""Fault matrix, part A: ranks that stop without ending, and ranks that end without stopping the rest.

See test_faults_process.py.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from support.dumps import MONITOR
from support.faults import BEATING, HARD_LIMIT_S, PASS_GATE, READY, Bound, Gate, launched
from support.processes import wait_for_end

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

GRACE_S = 1.0
#: Counts from the start for ranks that have not beaten yet, so it must leave them time to start.
TIMEOUT_S = 5.0
#: Found within the time-out and 5 s, and then ended with the grace.
HANG = Bound(TIMEOUT_S + 5 + GRACE_S, TIMEOUT_S + 30 + GRACE_S)
#: What dsrun exits with when it ends a job that hangs; see docs/reference/exit-codes.md.
EXIT_HANG = 76
AFTER_TIMEOUT = ("--start", "exec", "--hang-timeout", f"{TIMEOUT_S:g}s")
TWO_RANKS = ("-n", "2", *AFTER_TIMEOUT)

#: Both ranks take steps; then rank 1 does what is put in, and rank 0 waits for it.
STEPS = f"""{READY}
import ctypes, signal, threading
import dsrun

def hold_the_gil():
    # A lock of C that is taken twice, by a call that keeps the GIL: no signal ends it, no thread of Python runs.
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def wait_for_the_others():
    threading.Event().wait()

for step in range(3):
    dsrun.heartbeat(step=step, phase="forward")
%s
"""

#: What rank 1 does, and what rank 2; the others wait.
STOPS = 'stop() if os.environ["RANK"] == "1" else wait_for_the_others()'
BOTH = f'hold_the_gil() if os.environ["RANK"] == "2" else {STOPS}'


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_a_stopped_rank_and_one_that_holds_the_gil_are_found_with_the_stacks_of_all_and_the_job_ended(
    tmp_path: Path,
) -> None:
    args = ("-n", "3", *AFTER_TIMEOUT, "--on-hang", "stop")
    with launched(tmp_path, STEPS % BOTH, *args, grace_s=GRACE_S) as job:
        job.wait_ready(3)
        with HANG.on("finding and ending the hang"):
            ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    assert "rank 1 is stopped" in ended.text, ended.text
    assert "in hold_the_gil" in ended.text, ended.text
    # One that is stopped cannot say where it is.
    stacks = [(job.folder / f"rank{rank}.stacks.txt").read_text() for rank in (0, 2)]
    assert "wait_for_the_others" in stacks[0]
    assert "hold_the_gil" in stacks[1]
    assert len(job.events("hang")) == 1


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_a_job_that_hangs_once_is_started_again_when_asked(tmp_path: Path) -> None:
    program = STEPS % f"if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': {STOPS}"
    args = ("--on-hang", "restart", "--max-restarts", "1")
    with launched(tmp_path, program, *TWO_RANKS, *args, grace_s=GRACE_S) as job:
        job.wait_ready(2)
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert (len(job.events("hang")), len(job.events("restart"))) == (1, 1)


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_without_a_wish_a_hang_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    with launched(tmp_path, STEPS % 'if os.environ["RANK"] == "1": stop()', *TWO_RANKS, grace_s=GRACE_S) as job:
        pids = job.wait_ready(2)
        job.wait_for("rank 1 is stopped")
        job.kill(pids[1], signal.SIGCONT)
        ended = job.end()
    assert ended.exit_code == 0, ended.text


#: Behind `BEATING`: ranks of the engine. After two steps, rank 1 hangs in its own code, and rank 0 in the collective of
#: the third.
ENGINE = """
import torch
from torch import nn
torch.manual_seed(0)
engine, *_ = dsrun.initialize(model=nn.Linear(8, 4), config={
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
})
def load_a_batch_for_ever():
    threading.Event().wait()
while True:
    if engine.global_steps == 2:
        stop_beating()
        if engine.global_rank == 1:
            load_a_batch_for_ever()
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
"""


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_the_verdict_says_which_rank_of_an_engine_is_where_and_who_waits_for_it(tmp_path: Path) -> None:
    args = ("-n", "2", "--hang-timeout", f"{TIMEOUT_S:g}s", "--on-hang", "stop")
    with launched(tmp_path, BEATING + ENGINE, *args, grace_s=GRACE_S) as job:
        ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    (verdict,) = ended.errors
    assert re.search(r"rank 1 is in .*, rank 0 waits in reduce_scatter of unit 0 `\w+`$", verdict)
    assert re.search(r"rank 1 on localhost: in load_a_batch_for_ever \(train\.py:\d+\), step 2", ended.text)


#: Ranks of plain torch over Gloo.
RECORDED = f"""{BEATING}
import os
import torch
import torch.distributed as dist
{MONITOR}
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
has_dumped.wait()
stop_beating()
%s
"""
NEVER_COMES = """
if rank == 1:
    threading.Event().wait()
dist.all_reduce(torch.ones(4))
"""
CALLS_ANOTHER = """
if rank == 1:
    dist.broadcast(torch.ones(4), 0)
dist.all_reduce(torch.ones(4))
"""
RECORDED_RANKS = ("-n", "2", "--hang-timeout", f"{TIMEOUT_S:g}s", "--on-hang", "stop")


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_the_verdict_says_who_has_not_called_the_collective_that_the_others_wait_in(tmp_path: Path) -> None:
    with launched(tmp_path, RECORDED % NEVER_COMES, *RECORDED_RANKS, grace_s=GRACE_S) as job:
        ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    (verdict,) = ended.errors
    assert re.search(r"rank 1 is in Event.wait .*, rank 0 waits in all_reduce 4 of default_pg$", verdict), ended.text
    line = RECORDED.splitlines().index("%s") + 4
    told = f"default_pg: rank 0 waits in all_reduce 4 (train.py:{line}), rank 1 has not called it (last all_reduce 3)"
    assert f"  {told}" in ended.text.splitlines(), ended.text
    assert f"all collectives: {job.folder}/nccl_trace_rank_<N>\n" in ended.text
    assert {path.name for path in job.folder.glob("nccl_*")} == {"nccl_trace_rank_0", "nccl_trace_rank_1"}


@pytest.mark.soak("the collective that one has not called, from the same dumps; test_nccl_report.py has the words")
@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_the_verdict_names_ranks_that_call_different_collectives(tmp_path: Path) -> None:
    with launched(tmp_path, RECORDED % CALLS_ANOTHER, *RECORDED_RANKS, grace_s=GRACE_S) as job:
        ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    (verdict,) = ended.errors
    assert re.search(r"default_pg: rank 0 waits in all_reduce 4 \(train.py:\d+\), rank 1 is in broadcast 4 \(", verdict)


#: A rank of NCCL whose GPU is busy for some 15 s before the collective, and whose host reads the result.
NCCL = """
import os
import torch
import torch.distributed as dist
print("goes on", torch.ones(1, device="cuda"), flush=True)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
for _ in range(2):
    done = torch.ones(4, device="cuda")
    dist.all_reduce(done)
done.tolist()
print("reads", flush=True)
torch.cuda._sleep(int(30e9))
late = torch.ones(8, device="cuda")
dist.all_reduce(late)
late.tolist()
"""


@pytest.mark.cuda
@pytest.mark.gpu_seconds(18)
@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_a_rank_that_reads_from_its_gpu_is_told_to_wait_in_the_collective_that_nccl_has_not_done(
    tmp_path: Path,
) -> None:
    args = ("-n", "1", "--hang-timeout", f"{TIMEOUT_S:g}s", "--on-hang", "stop")
    with launched(tmp_path, NCCL, *args, env={"CUDA_VISIBLE_DEVICES": None}, grace_s=GRACE_S) as job:
        ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    (verdict,) = ended.errors
    assert verdict.endswith("rank 0 waits in all_reduce 3 of default_pg"), ended.text
    stuck = "all its ranks have called it: a GPU or the network between them is stuck"
    assert f"  default_pg: rank 0 waits in all_reduce 3 (train.py:14), and {stuck}" in ended.text.splitlines(), (
        ended.text
    )


#: A rank that ends as NCCL's watchdog ends it, after it had all ranks write their dumps; rank 1 waits elsewhere.
WATCHDOG = """
import os, pathlib, pickle, sys, threading, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
rank = int(os.environ["RANK"])
asked = pathlib.Path(os.environ["DSRUN_STACKS"]).with_name("rank1.stacks.txt")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
while not pickle.loads(_dump_fr_trace())["entries"][0]["retired"]:
    pass  # Gloo's thread says so a moment later.
if rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb") as file:
    file.write(_dump_fr_trace())
store = dist.distributed_c10d._get_default_store()
store.set(f"dumped {rank}", "")
store.wait(["dumped 0", "dumped 1"])
def tell_that_it_waits(thread=threading.get_ident()):
    names = []
    while names != ["wait", "wait", "<module>"]:
        at = sys._current_frames()[thread]
        names = [frame.f_code.co_name for frame in (at, at.f_back, at.f_back and at.f_back.f_back) if frame]
    store.set("rank 1 waits", "")
if rank == 0:
    store.wait(["rank 1 waits"])
    print("[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] "
          "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, "
          "Timeout(ms)=600000) ran for 600014 milliseconds before timing out.", file=sys.stderr)
    for number in range(60):
        print(f"frame #{number}: c10d::ProcessGroupNCCL::Watchdog::run()", file=sys.stderr)
    sys.stderr.flush()
    # torch gives dumps a while, too: the question for stacks is answered meanwhile.
    deadline_s = time.monotonic() + 20
    while not asked.exists() or not asked.stat().st_size:
        assert time.monotonic() < deadline_s, "rank 1 was never asked"
        time.sleep(0.01)
    os.abort()
threading.Thread(target=tell_that_it_waits, daemon=True).start()
never = threading.Event()
never.wait()
"""


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_a_rank_that_nccls_watchdog_ended_is_told_as_the_time_out_with_who_was_waited_for(tmp_path: Path) -> None:
    with launched(tmp_path, WATCHDOG, "-n", "2", grace_s=GRACE_S) as job:
        ended = job.end()
    assert ended.exit_code == 128 + signal.SIGABRT, ended.text
    (head,) = ended.errors
    said = "a collective timed out: all_reduce 2 of default_pg was not done after 10m 0s"
    assert head.endswith(f"was killed by SIGABRT: {said}")
    after = ended.text.splitlines()[ended.text.splitlines().index(head) + 1]
    assert (
        after
        == "  default_pg: rank 0 waits in all_reduce 2 (train.py:13), rank 1 has not called it (last all_reduce 1)"
    )
    # Rank 1 was asked before it was stopped.
    (told,) = [line for line in ended.text.splitlines() if "torch's watchdog ends rank 0: " in line]
    assert "rank 1 is in Event.wait (threading.py:" in told


#: Rank 0 returns at once; rank 1 goes on.
EARLY = f"{READY}\nimport dsrun\ndsrun.heartbeat(step=1)\nif os.environ['RANK'] == '0': sys.exit(0)\n"


def test_A12_a_job_waits_for_the_others_when_one_rank_returns_early(tmp_path: Path, gate: Gate) -> None:
    args = ("-n", "2", "--start", "exec")
    with launched(tmp_path, EARLY + PASS_GATE + "print('went on')\n", *args, words=[gate.path]) as job:
        pids = job.wait_ready(2)
        assert wait_for_end(pids[0], timeout_s=30)
        gate.let_through(1)
        ended = job.end()
    assert ended.exit_code == 0
    assert ended.out[-1] == "[1] went on"


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A12_the_hang_report_names_the_rank_that_has_ended_already(tmp_path: Path) -> None:
    program = f"{EARLY}import threading\nthreading.Event().wait()\n"
    with launched(tmp_path, program, *TWO_RANKS, "--on-hang", "stop", grace_s=GRACE_S) as job:
        job.wait_ready(2)
        with HANG.on("finding and ending the hang"):
            ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    assert "rank 0 has ended" in ended.text, ended.text
