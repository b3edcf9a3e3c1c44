"""Fault matrix, part A, in pipelines: a stage that dies and a stage that stops. See test_faults_process.py.

What counts beside the common oracle: who is told to be the cause, and what the other stages are told to wait for.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from support.faults import BEATING, HARD_LIMIT_S, Bound, launched

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

GRACE_S = 1.0
#: Counts from the start for ranks that have not beaten yet, so it must leave them time to start.
TIMEOUT_S = 5.0
#: As in test_faults_process.py and test_faults_hang.py.
DEAD_RANK = Bound(5 + GRACE_S, 20 + GRACE_S)
HANG = Bound(TIMEOUT_S + 5 + GRACE_S, TIMEOUT_S + 30 + GRACE_S)
EXIT_HANG = 76
AFTER_TIMEOUT = ("--hang-timeout", f"{TIMEOUT_S:g}s", "--on-hang", "stop")

#: Behind `BEATING`: trains for ever, and says `ready` after two updates. Words: stages; and the layer that stops in its
#: third update's micro batch 1, or none.
STAGES = """
import itertools, os, sys
import torch
from torch import nn
torch.set_num_threads(1)
stages, stops = int(sys.argv[1]), sys.argv[2]
def compute_for_ever():
    threading.Event().wait()
class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.runs = number, 0
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        if has_started.is_set():
            self.runs += 1
            if str(self.number) == stops and self.runs == 2:
                compute_for_ever()
        return x + self.layer(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(6))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
torch.manual_seed(0)
engine, *_ = dsrun.initialize(model=Model(), config={
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    "pipeline": {"stages": stages},
})
data = itertools.repeat(torch.ones(2, 8))
while True:
    if engine.global_steps == 2:
        stop_beating()
        sys.stdout.write(f"ready {os.getpid()}\\n")
        sys.stdout.flush()
    engine.train_batch(data)
"""


@pytest.mark.depends_on_speed("the bound DEAD_RANK")
@pytest.mark.parametrize(
    "dies", [0, pytest.param(1, marks=pytest.mark.soak("the other stage, and SIGKILL in test_faults_axes.py"))]
)
def test_A2_a_stage_killed_by_SIGKILL_in_a_step_is_named_as_the_first_failure(tmp_path: Path, dies: int) -> None:
    with launched(tmp_path, BEATING + STAGES, "-n", "2", words=["2", "none"], grace_s=GRACE_S) as job:
        pids = job.wait_ready(2)
        with DEAD_RANK.on("the end of all ranks"):
            job.kill(pids[dies])
            ended = job.end()
            job.gone()
    assert ended.exit_code == 137, ended.text
    assert (
        ended.errors[0] == f"error: rank {dies} (pipe {dies}) on localhost (pid {pids[dies]}) was killed by SIGKILL"
    ), ended.text


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_a_layer_that_never_returns_is_told_with_what_each_other_stage_waits_for(tmp_path: Path) -> None:
    # The first layer of the middle one of three stages.
    with launched(tmp_path, BEATING + STAGES, "-n", "3", *AFTER_TIMEOUT, words=["3", "2"], grace_s=GRACE_S) as job:
        job.wait_ready(3)
        with HANG.on("finding and ending the hang"):
            ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    (verdict,) = ended.errors
    assert "rank 1 (pipe 1) is in " in verdict, verdict
    for waits in (
        "rank 0 (pipe 0) waits in receive of gradients of micro batch 0 for chunk 0 from rank 1",
        "rank 2 (pipe 2) waits in receive of activations of micro batch 1 for chunk 2 from rank 1",
    ):
        assert waits in verdict, verdict
    assert re.search(r"rank 1 \(pipe 1\) on localhost: in compute_for_ever \(train\.py:\d+\), step 2", ended.text), (
        ended.text
    )


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_a_stopped_stage_is_told_with_what_the_other_one_waits_for(tmp_path: Path) -> None:
    with launched(tmp_path, BEATING + STAGES, "-n", "2", *AFTER_TIMEOUT, words=["2", "none"], grace_s=GRACE_S) as job:
        pids = job.wait_ready(2)
        with HANG.on("finding and ending the hang"):
            job.kill(pids[0], signal.SIGSTOP)
            ended = job.end()
    assert ended.exit_code == EXIT_HANG, ended.text
    (verdict,) = ended.errors
    assert "rank 0 (pipe 0) is stopped" in verdict, verdict
    # Wherever it was stopped: most often between two messages, and at times in the reduction at the end of a step.
    assert re.search(r"rank 1 \(pipe 1\) waits in \w+( max)? of ", verdict), verdict
