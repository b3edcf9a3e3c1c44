"""A real job with a rank whose own work takes a fifth longer: it is named, with what the others wait in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from support.live_job import live_job

RANKS, SLOW = 4, 2
#: Three windows of ten seconds, and some more for the start.
STEPS = 300
#: Sleeps in the place of computing: four ranks of a machine with two cores would slow each other.
SCRIPT = f"""
import os, time
import torch
from torch import nn
import dsrun

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        time.sleep(0.05 * (1.2 if os.environ["RANK"] == "{SLOW}" else 1.0))
        return x + self.linear(x)

model = nn.Sequential(Block(), Block())
config = {{
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {{"type": "Adam", "params": {{"lr": 1e-3}}}},
    "zero_optimization": {{"stage": 2}},
}}
engine, *_ = dsrun.initialize(model=model, config=config)
for _ in range({STEPS}):
    engine.backward(engine(torch.ones(1, 64)).square().mean())
    engine.step()
"""

pytestmark = [pytest.mark.timeout(150), pytest.mark.depends_on_speed("ranks that differ by a fifth of 100 ms")]


def test_a_rank_that_computes_a_fifth_longer_is_named_with_what_the_others_wait_in(tmp_path: Path) -> None:
    with live_job(tmp_path, SCRIPT, "-n", str(RANKS)) as job:
        job.wait_for_ranks(RANKS, lambda rank: rank.longest_wait)
        top = json.loads(job.ask("top", "last", "--json"))["jobs"][0]["ranks"]
        said = job.end()

    # The launcher, from heartbeats alone.
    (folder,) = job.folders
    events: list[dict[str, Any]] = [json.loads(line) for line in JobPaths(folder).events.read_text().splitlines()]
    (straggler,) = [event for event in events if event["event"] == "straggler"]
    assert straggler["rank"] == SLOW
    assert straggler["others_s"] > 0.1
    # Two blocks of 10 ms more each.
    assert 0.015 < straggler["own_s"] - straggler["others_s"] < 0.035
    assert straggler["others_wait_in"].startswith("reduce_scatter of unit ")
    assert straggler["others_wait_s"] > 0.01 > straggler["waits_s"]
    assert f"rank {SLOW} on localhost is steadily slower than the others" in said
    assert f"they wait longest in {straggler['others_wait_in']}, " in said

    # Each rank, while the job ran.
    for rank in top:
        share = rank["longest_wait_s"] / rank["step_s"]
        assert (share > 0.08) == (rank["rank"] != SLOW), rank

    # The ranks' own records.
    waits = json.loads(job.ask("show", "last", "--waits", "--json"))
    assert waits["waited_for"]["ranks"] == [SLOW]
    assert waits["waited_for"]["kind"] == "reduce_scatter"
    assert waits["waited_for"]["collective"].startswith("reduce_scatter of unit ")
    assert 0.01 < waits["waited_for"]["lost_s"] < 0.03
    waited_s = waits["waits"]["waited_s"]
    assert min(waited_s, key=waited_s.__getitem__) == str(SLOW)
    assert len(waited_s) == RANKS
    assert (waits["waits"]["ranks"], waits["waits"]["steps"]) == (RANKS, 20)
    assert job.ask("show", "last", "--waits").startswith(f"rank {SLOW} is waited for: the others wait ")
