"""What a record of a step holds, and what it leaves out where it is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsrun.contract import RECORDS_FILE, RUN_DIR_ENV, STEP_EVENT
from support.models import CONTEXT
from support.training import config, make_engine, train

SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 40}}


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the records of the steps so far."""
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))

    def read() -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (tmp_path / RECORDS_FILE).read_text().splitlines()]
        return [record for record in records if record["event"] == STEP_EVENT]

    return read


def test_a_step_on_tokens_says_how_fast_and_how_far_it_is(steps: Any) -> None:
    engine = make_engine(config(1, micro=2, accumulation=3, scheduler=SCHEDULE))
    numel = sum(param.numel() for param in engine.module.parameters())
    train(engine, range(2), samples=6)
    for record in steps():
        assert record["total_steps"] == 40
        # Seconds have six digits.
        assert record["tokens_per_s"] == pytest.approx(6 * CONTEXT / record["seconds"], rel=0.01)
        assert record["tflops"] == pytest.approx(6 * numel * record["tokens_per_s"] / 1e12, abs=1e-6)
        assert 10e6 < record["memory_bytes"] < 100e9


def test_a_forward_without_gradients_is_no_training(steps: Any) -> None:
    engine = make_engine(config(1, micro=2))
    with torch.no_grad():
        engine(torch.zeros(64, CONTEXT, dtype=torch.int64))
    train(engine, range(1), samples=2)
    [record] = steps()
    assert record["tokens_per_s"] == pytest.approx(2 * CONTEXT / record["seconds"], rel=0.01)


def test_what_is_not_known_is_left_out(steps: Any) -> None:
    engine = make_engine(config(1, micro=2), model=nn.Linear(3, 2))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    [record] = steps()
    assert not {"tokens_per_s", "tflops", "total_steps"} & record.keys()
    assert record["samples"] == 2
