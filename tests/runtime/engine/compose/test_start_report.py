"""Whether a run is recorded, as all ranks see it: one of them may have lost the launcher's variable."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from dsrun.contract.environment import RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.wait_records import WAITS_EVENT
from dsrun.runtime.observe.steps.spread import NAMES, TIERS
from dsrun.runtime.observe.wait_report import STEPS_PER_RECORD
from support.ranks import run_ranks
from support.training import config, make_engine


def _gathered(folder: Path, without: int | None) -> tuple[int, int]:
    """Returns the all-gathers, and their bytes, of the steps that the first record is of."""
    os.environ.pop(RUN_DIR_ENV, None)
    if int(os.environ["RANK"]) != without:
        os.environ[RUN_DIR_ENV] = str(folder)
    engine = make_engine(config(0, micro=1), model=torch.nn.Linear(3, 2))
    before = engine.counters()
    for _ in range(STEPS_PER_RECORD + 1):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
    moved = engine.counters().since(before).collectives
    return moved.calls.get("all_gather", 0), moved.bytes.get("all_gather", 0)


def _events(folder: Path) -> set[str]:
    records = JobPaths(folder).records
    return {json.loads(line)["event"] for line in records.read_text().splitlines()} if records.exists() else set()


def test_ranks_that_know_that_the_run_is_recorded_compare_their_waits(tmp_path: Path) -> None:
    numbers = 256 * 3 + STEPS_PER_RECORD * len(NAMES) + len(TIERS)
    assert run_ranks(2, _gathered, tmp_path, None) == [(1, 2 * numbers * 8)] * 2
    assert {"start", WAITS_EVENT} <= _events(tmp_path)


@pytest.mark.parametrize("without", [0, 1])
def test_ranks_of_which_one_does_not_know_it_train_and_compare_nothing(tmp_path: Path, without: int) -> None:
    assert run_ranks(2, _gathered, tmp_path, without) == [(0, 0)] * 2
    assert WAITS_EVENT not in _events(tmp_path)
    assert ("start" in _events(tmp_path)) == (without != 0)
