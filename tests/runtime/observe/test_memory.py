"""Predicted bytes of model state follow ZeRO's formulas; measured ones count each storage once."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.observe.memory import StatePrediction, measure
from dsrun.runtime.zero.units.plan import ZeroPlan

P = 1 << 20  # a unit; sixteen of them


@pytest.mark.parametrize("world_size", [1, 64])
def test_mixed_precision_adam_takes_what_zero_says_and_the_fp32_gradient_sum(world_size: int) -> None:
    layouts = [lay_out(f"b{i}", [("w", (P,))], world_size=world_size) for i in range(16)]
    total, n = 16 * P, world_size
    slots = 2 * P
    expected = {
        0: total * (2 + 2 + 4 + 4 + 8),
        1: total * (2 + 2) + total // n * (4 + 4 + 8),
        2: total * 2 + slots * 2 + total // n * (4 + 4 + 8),
        3: total // n * 2 + slots * 2 + slots * 2 + total // n * (4 + 4 + 8),
    }
    for stage, size in expected.items():
        plan = ZeroPlan.of_stage(stage)
        prediction = StatePrediction(
            layouts=layouts,
            has_module=[True] * 16,
            compute=torch.bfloat16,
            master=torch.float32,
            states_per_element=2,
            shard_optimizer=plan.shard_optimizer,
            shard_gradients=plan.shard_gradients,
            shard_parameters=plan.shard_parameters,
        )
        assert prediction.total_bytes() == size


def test_views_of_one_storage_are_counted_once() -> None:
    base = torch.zeros(100)
    assert measure([base, base[10:20], base.view(10, 10), torch.zeros(0), torch.zeros(3, dtype=torch.bfloat16)]) == 406
