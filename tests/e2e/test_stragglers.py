"""A real job with a rank whose own work takes a fifth longer: it is named, with what the others wait in."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.jobs.live_status import LiveRank, read_live
from support.cli import clean_environment

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


def dsrun(*words: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "dsrun", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True).stdout


def live_ranks(folder: Path) -> list[LiveRank]:
    live = read_live(folder)
    return [] if live is None else [rank for rank in live.ranks if rank.longest_wait]


def test_a_rank_that_computes_a_fifth_longer_is_named_with_what_the_others_wait_in(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = clean_environment(OMP_NUM_THREADS="1", XDG_STATE_HOME=str(tmp_path))
    command = [sys.executable, "-m", "dsrun", "-n", str(RANKS), "train.py"]
    job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        seen: list[LiveRank] = []
        deadline_s = time.monotonic() + 60
        while len(seen) < RANKS and time.monotonic() < deadline_s:
            time.sleep(0.2)
            seen = [rank for folder in (tmp_path / "dsrun" / "jobs").glob("*") for rank in live_ranks(folder)]
        assert len(seen) == RANKS, "every rank tells where it waits longest while it runs"
        top = json.loads(dsrun("top", "last", "--json", env=env))["jobs"][0]["ranks"]
        _, said = job.communicate(timeout=90)
    finally:
        job.kill()
    assert job.returncode == 0, said

    # The launcher, from heartbeats alone.
    (folder,) = (tmp_path / "dsrun" / "jobs").iterdir()
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
    waits = json.loads(dsrun("show", "last", "--waits", "--json", env=env))
    assert waits["waited_for"]["ranks"] == [SLOW]
    assert waits["waited_for"]["kind"] == "reduce_scatter"
    assert waits["waited_for"]["collective"].startswith("reduce_scatter of unit ")
    assert 0.01 < waits["waited_for"]["lost_s"] < 0.03
    waited_s = waits["waits"]["waited_s"]
    assert min(waited_s, key=waited_s.__getitem__) == str(SLOW)
    assert len(waited_s) == RANKS
    assert (waits["waits"]["ranks"], waits["waits"]["steps"]) == (RANKS, 20)
    assert dsrun("show", "last", "--waits", env=env).startswith(f"rank {SLOW} is waited for: the others wait ")
