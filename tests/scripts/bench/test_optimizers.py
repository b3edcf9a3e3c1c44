"""scripts/bench/optimizers.py measures what it says, on a run short enough for a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "optimizers.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_optimizers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_8_bit_adam_learns_the_example_as_adam_in_32_bits(bench: Any) -> None:
    example = bench.load_example()
    text = torch.frombuffer(bytearray(SCRIPT.read_bytes() * 8), dtype=torch.uint8)
    data = example.TextWindows(text, 128)
    size: dict[str, int] = {"steps": 40, "batch": 2, "width": 64, "layers": 2}
    losses = {name: bench.learn(name, example, data=data, **size) for name in ("AdamW", "Adam8bit")}
    assert losses["AdamW"] < 4.5, "of 5.5 at first"
    ((said, met),) = bench.judge([], losses)
    assert met, said


def test_every_optimizer_is_timed_beside_its_origin(bench: Any) -> None:
    rows = bench.time_steps(
        bench.NAMES, lambda: bench.load_example().GPT(width=64, heads=2, layers=2, context=32), runs=1
    )
    assert [row["optimizer"] for row in rows] == list(bench.NAMES)
    assert all(row["ns a parameter"] > 0 and row["GB/s"] > 0 for row in rows)
    with_peers = {row["optimizer"] for row in rows if row["speed of peer's"] is not None}
    assert {"AdamW", "SGD", "Adagrad", "Adafactor"} <= with_peers


def test_bars_that_are_missed_are_said(bench: Any) -> None:
    rows = [
        {"optimizer": "AdamW", "speed of peer's": 0.5, "state bytes a parameter": 8.0},
        {"optimizer": "Adam8bit", "speed of peer's": None, "state bytes a parameter": 2.2},
    ]
    found = bench.judge(rows, {"AdamW": 2.0, "Adam8bit": 2.1, "Lion": 3.0, "Lion8bit": 3.1, "Muon": 9.0})
    assert [met for _, met in found] == [False] * 4
    assert found[0][0] == "AdamW on shards: 0.50 of torch fused, at least 0.9"


def test_the_table_shows_each_loss_beside_adams_and_beside_its_origins(bench: Any) -> None:
    losses = {"AdamW": 2.0, "Lion": 4.0, "Lion8bit": 5.0, "Muon": 1.0}
    assert bench.losses_table(losses, steps=300).splitlines()[2:] == [
        "| AdamW | 0.001 | 2.0000 |  |  |",
        "| Lion | 0.0001 | 4.0000 | +100.00% |  |",
        "| Lion8bit | 0.0001 | 5.0000 | +150.00% | +25.00% |",
        "| Muon | 0.01 | 1.0000 | -50.00% |  |",
    ]
