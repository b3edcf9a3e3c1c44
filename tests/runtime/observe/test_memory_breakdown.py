"""`memory_breakdown` prints what each tier holds after each step, by kind, the largest first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsrun
from dsrun.memory_use.samples import TierUse
from dsrun.runtime.observe.memory_breakdown import breakdown_lines

GIB = 1 << 30


def test_each_tier_is_a_line_with_its_kinds_the_largest_first() -> None:
    gpu = TierUse(
        tier="gpu",
        held_bytes=10 * GIB,
        peak_bytes=9 * GIB,
        live_bytes=7 * GIB,
        reserved_bytes=10 * GIB,
        kinds=(("parameters", GIB), ("optimizer states", 4 * GIB), ("empty", 0)),
    )
    cpu = TierUse(tier="cpu", held_bytes=2 * GIB, peak_bytes=3 * GIB, live_bytes=None, reserved_bytes=None)
    assert breakdown_lines(3, [gpu, cpu]) == [
        "dsrun: memory after step 3: gpu 10.0 GiB, peak 9.0 GiB: optimizer states 4.0 GiB, "
        "held free by the allocator 3.0 GiB, other tensors 2.0 GiB, parameters 1.0 GiB",
        "dsrun: memory after step 3: cpu 2.0 GiB, peak 3.0 GiB: rest of the process 2.0 GiB",
    ]


@pytest.mark.parametrize("is_on", [True, False])
def test_an_engine_prints_it_after_each_step_where_the_config_says_so(
    is_on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "memory_breakdown": is_on,
    }
    engine, *_ = dsrun.initialize(model=nn.Linear(4, 4), config=config)
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 4, device=engine.device)).mean())
        engine.step()
    lines = [line for line in capsys.readouterr().out.splitlines() if "memory after step" in line and ": cpu " in line]
    engine.destroy()
    assert [line.split()[4] for line in lines] == (["1:", "2:"] if is_on else [])
    assert all("parameters " in line for line in lines if not torch.cuda.is_available())
