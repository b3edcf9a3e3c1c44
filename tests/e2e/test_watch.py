"""A real job that is watched while it trains: its figures, its page, and its lines to the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.live_job import live_job

RANKS, STEPS = 2, 25
SCRIPT = f"""
import time
import torch
from torch import nn
import dsrun

engine, *_ = dsrun.initialize(
    model=nn.Linear(8, 8),
    config={{"train_micro_batch_size_per_gpu": 2, "optimizer": {{"type": "Adam", "params": {{"lr": 1e-3}}}}}},
)
for _ in range({STEPS}):
    time.sleep(0.1)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
"""

pytestmark = pytest.mark.timeout(150)


def test_a_job_is_watched_to_its_end(tmp_path: Path) -> None:
    with live_job(tmp_path, SCRIPT, "-n", str(RANKS)) as job:
        job.wait_for_ranks(RANKS, lambda rank: (rank.step or 0) > 2)
        value = json.loads(job.ask("watch", "--json"))
        page = job.ask("watch", "--once", "last").splitlines()
        lines = job.ask("watch", "last", "--every", "0.5s").splitlines()
        job.end()
    assert value["job"]["state"] == "running"
    assert 2 < value["last_step"]["step"] <= STEPS
    assert len(value["ranks"]) == RANKS
    assert page[1].startswith("loss ")
    assert "  step " in page[0]
    assert len(lines) >= 2
    assert f" done  step {STEPS}  loss " in lines[-1]
