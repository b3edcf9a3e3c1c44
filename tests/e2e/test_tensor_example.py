"""The example of tensor parallelism under the real launcher: two ranks that share layers train as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.example_runs import ExampleRun, run_example


def run_tensor(folder: Path, ranks: int, *, steps: int = 3, **section: Any) -> ExampleRun:
    """Runs updates of the example on some ranks that share layers, from its last checkpoint on."""
    words = ("--steps", str(steps), "--checkpoint", "saved")
    config = {"tensor_parallel": {"autotp_size": ranks, **section}}
    return run_example(folder, "tensor", *words, ranks=ranks, layers=2, config=config)


def test_two_ranks_that_share_layers_train_as_one_and_either_goes_on_from_the_other(tmp_path: Path) -> None:
    one = run_tensor(tmp_path / "one", 1)
    two = run_tensor(tmp_path / "two", 2, sequence_parallel=True)
    assert len(one.steps) == 3
    for found, expected in zip(two.steps, one.steps, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert two.flops_a_token == pytest.approx(one.flops_a_token, rel=1e-4), "operations of whole layers"
    assert "layers cut over 2 ranks" in two.out
    starts = [next(record for record in run.records if record["event"] == "start") for run in (one, two)]
    assert starts[0]["model"] == starts[1]["model"], "the record has the whole model"
    further = run_tensor(tmp_path / "two", 1, steps=4)
    assert "going on from" in further.out
    assert len(further.steps) == 1
