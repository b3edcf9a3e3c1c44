"""Fault matrix, part A, where several axes divide the ranks: who dies or stops is told with its place on each of them.

See test_faults_process.py. What one stage of a pipeline is told to wait for stands in test_faults_pipeline.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.faults import BEATING, HARD_LIMIT_S, Bound, launched

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

GRACE_S = 1.0
#: As in test_faults_pipeline.py.
TIMEOUT_S = 5.0
DEAD_RANK = Bound(5 + GRACE_S, 20 + GRACE_S)
HANG = Bound(TIMEOUT_S + 5 + GRACE_S, TIMEOUT_S + 30 + GRACE_S)
EXIT_HANG = 76

#: Behind `BEATING`: trains for ever, and says `ready` after two updates. Two ranks share each layer. Words: stages; the
#: rank that stops in its third update, or none.
GRID = """
import itertools, os, sys
import torch
from torch import nn
torch.set_num_threads(1)
stages, stops = int(sys.argv[1]), sys.argv[2]
def compute_for_ever():
    threading.Event().wait()
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        if has_started.is_set() and os.environ["RANK"] == stops:
            compute_for_ever()
        return x + self.down(self.up(x).relu())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
torch.manual_seed(0)
engine, *_ = dsrun.initialize(model=Model(), config={
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1},
    "pipeline": {"stages": stages},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
        {"patterns": r".*\\.up\\.(weight|bias)", "partition_type": "column"},
        {"patterns": r".*\\.down\\.(weight|bias)", "partition_type": "row"},
    ]}},
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
@pytest.mark.parametrize(("stages", "coordinate"), [(1, "data 1, tensor 0"), (2, "pipe 1, tensor 0")])
def test_A2_a_rank_killed_by_SIGKILL_is_named_with_its_place_on_each_axis(
    tmp_path: Path, stages: int, coordinate: str
) -> None:
    with launched(tmp_path, BEATING + GRID, "-n", "4", words=[str(stages), "none"], grace_s=GRACE_S) as job:
        pids = job.wait_ready(4)
        with DEAD_RANK.on("the end of all ranks"):
            job.kill(pids[2])
            ended = job.end()
            job.gone()
    assert ended.exit_code == 137, ended.text
    who = f"rank 2 ({coordinate}) on localhost"
    assert ended.errors[0] == f"error: {who} (pid {pids[2]}) was killed by SIGKILL", ended.text
    assert f"dsrun: {who} was killed by SIGKILL; stopping " in ended.text, ended.text


@pytest.mark.depends_on_speed("a hang time-out of a few seconds")
def test_A4_a_rank_that_never_returns_and_each_that_waits_are_named_with_their_places_on_the_axes(
    tmp_path: Path,
) -> None:
    args = ("-n", "4", "--hang-timeout", f"{TIMEOUT_S:g}s", "--on-hang", "stop")
    with launched(tmp_path, BEATING + GRID, *args, words=["1", "3"], grace_s=GRACE_S) as job:
        job.wait_ready(4)
        with HANG.on("finding and ending the hang"):
            ended = job.end()
            job.gone()
    assert ended.exit_code == EXIT_HANG, ended.text
    (verdict,) = ended.errors
    for said in (
        r": rank 3 \(data 1, tensor 1\) is in ",
        # It shares the layer with rank 3; the other two share theirs, and wait for the gradients of both.
        r", rank 2 \(data 1, tensor 0\) waits in all_reduce sum of outputs of a cut layer",
        r", ranks 0, 1 \(data 0\) wait in \w+",
    ):
        assert re.search(said, verdict), verdict
    assert re.search(r"^  rank 3 \(data 1, tensor 1\) on localhost: in compute_for_ever ", ended.text, re.M), ended.text
    assert re.search(r"^  ranks 0-1 \(data 0\) on localhost: ", ended.text, re.M), ended.text
