"""`dsrun top` of a pipeline that runs: each rank's stage, and the share of a step that it waits for other stages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsrun.launcher.jobs.live_status import LiveRank, read_live
from support.cli import clean_environment

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


def dsrun(*words: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "dsrun", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True).stdout


def live_ranks(folder: Path) -> list[LiveRank]:
    live = read_live(folder)
    return [] if live is None else [rank for rank in live.ranks if rank.step_s]


def test_top_tells_the_stage_and_the_bubble_of_each_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = clean_environment(OMP_NUM_THREADS="1", XDG_STATE_HOME=str(tmp_path))
    command = [sys.executable, "-m", "dsrun", "-n", "2", "--backend", "gloo", "train.py"]
    job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        seen: list[LiveRank] = []
        deadline_s = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.2)
            seen = [rank for folder in (tmp_path / "dsrun" / "jobs").glob("*") for rank in live_ranks(folder)]
        top = json.loads(dsrun("top", "last", "--json", env=env))["jobs"][0]["ranks"]
        text = dsrun("top", "last", env=env)
        _, said = job.communicate(timeout=90)
    finally:
        job.kill()
    assert job.returncode == 0, said

    assert [(rank["stage"], rank["stages"], rank["schedule_wait"]) for rank in top] == [(0, 2, 0.3333), (1, 2, 0.3333)]
    # The last stage waits for messages in the first half of its bubble alone, and for the others' norm in the second.
    for rank in top:
        assert 0.25 < rank["stage_wait_s"] / rank["step_s"] < 0.45, top
    job_line, names, *rows = text.splitlines()
    assert job_line.endswith("; 2 stages, whose schedule has ranks wait 33% of a step")
    assert "STAGE  BUBBLE  WAITS MOST IN" in names
    assert [row[names.index("STAGE") :][:3] for row in rows] == ["0/2", "1/2"]
    waits = json.loads(dsrun("show", "last", "--waits", "--json", env=env))["waits"]
    assert "receive from other stages" in [each["label"] for each in waits["labels"]]
