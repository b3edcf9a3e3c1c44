"""`dsrun top` of a pipeline that runs: each rank's stage, and the share of a step that it waits for other stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.live_job import live_job

#: Sleeps in the place of computing; two stages and two micro batches wait for a third of a step.
SCRIPT = """
import time
import torch
from torch import nn
import dsrun
from dsrun.pipe import PipelineModule

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.05)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.05)
        return grad

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Slow.apply(self.linear(x))

config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}
model = PipelineModule([Block(), Block()], num_stages=2, loss_fn=nn.functional.mse_loss)
engine, *_ = dsrun.initialize(model=model, config=config)
pair = (torch.ones(1, 8), torch.zeros(1, 8))
for _ in range(30):
    engine.train_batch(iter([pair, pair]))
"""

pytestmark = [pytest.mark.timeout(150), pytest.mark.depends_on_speed("stages of 100 ms")]


def test_top_tells_the_stage_and_the_bubble_of_each_rank(tmp_path: Path) -> None:
    with live_job(tmp_path, SCRIPT, "-n", "2", "--backend", "gloo") as job:
        job.wait_for_ranks(2, lambda rank: rank.step_s)
        top = json.loads(job.ask("top", "last", "--json"))["jobs"][0]["ranks"]
        text = job.ask("top", "last")
        job.end()

    assert [(rank["stage"], rank["stages"], rank["schedule_wait"]) for rank in top] == [(0, 2, 0.3333), (1, 2, 0.3333)]
    # The last stage waits for messages in the first half of its bubble alone, and for the others' norm in the second.
    for rank in top:
        assert 0.25 < rank["stage_wait_s"] / rank["step_s"] < 0.45, top
    job_line, names, *rows = text.splitlines()
    assert job_line.endswith("; 2 stages, whose schedule has ranks wait 33% of a step")
    assert "STAGE  BUBBLE  WAITS MOST IN" in names
    assert [row[names.index("STAGE") :][:3] for row in rows] == ["0/2", "1/2"]
    waits = json.loads(job.ask("show", "last", "--waits", "--json"))["waits"]
    assert "receive from other stages" in [each["label"] for each in waits["labels"]]
