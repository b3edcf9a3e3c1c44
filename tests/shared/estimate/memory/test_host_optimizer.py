"""What an optimizer in host memory takes is what the runtime reserves, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsrun.choices.resident_units import room_at_ratio, units_that_stay
from dsrun.estimate.memory.host_optimizer import host_optimizer_bytes
from dsrun.estimate.memory.model_state import bytes_off_device, pad_units, state_bytes
from dsrun.estimate.model.units import UnitGroup
from dsrun.estimate.run.settings import RunSettings
from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.observe.memory import HostOptimizer, StatePrediction
from dsrun.runtime.zero.units.plan import ZeroPlan

UNITS = (
    UnitGroup("embedding", 61 * 72),
    UnitGroup("blocks", 37_001, count=3),
    UnitGroup("rest", 1_017, has_module=False),
)
BF16 = RunSettings(compute_bytes=2, offload_optimizer="cpu")
FP32 = RunSettings(compute_bytes=4, offload_optimizer="cpu")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("settings", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("params", ["none", "cpu"])
@pytest.mark.parametrize("ratio", [1.0, 0.6, 0.2, 0.0])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_the_estimate_is_the_runtimes_own(
    ranks: int, stage: int, settings: RunSettings, micro_steps: int, params: str, ratio: float, ahead: bool
) -> None:
    flat = [(unit.numel, unit.has_module) for unit in UNITS for _ in range(unit.count)]
    units = pad_units(UNITS, ranks)
    numels = [unit.shard for unit in units]
    stays = units_that_stay(numels, [unit.has_module for unit in units], room_at_ratio(numels, ratio))
    plan = ZeroPlan.of_stage(stage)
    compute = torch.bfloat16 if settings.compute_bytes == 2 else torch.float32
    adds_up = micro_steps > 1
    settings = replace(settings, stage=stage, accumulation_steps=micro_steps, offload_param=params, offload_ratio=ratio)
    settings = replace(settings, steps_ahead=ahead)
    theirs = StatePrediction(
        layouts=[lay_out("unit", [("w", (numel,))], world_size=ranks) for numel, _ in flat],
        has_module=[has_module for _, has_module in flat],
        compute=compute,
        master=torch.float32,
        states_per_element=2,
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
        shard_parameters=plan.shard_parameters,
        trained_on_host=settings.trained_leave,
        host_optimizer=HostOptimizer(
            compute,
            adds_up=adds_up,
            widens=not adds_up and compute == torch.bfloat16 and ranks == 3,
            stays=stays,
            ahead=ahead,
        ),
    )
    away, state = host_optimizer_bytes(units, settings), state_bytes(units, settings)
    slices = bytes_off_device(units, settings)
    assert theirs.host_bytes() == away.host + slices
    on_device = state.parameters - slices + state.gather_slots + state.gradients + state.gradient_slots
    of_optimizer = away.device_sums + away.device_masters + away.device_states
    assert theirs.total_bytes() == away.host + slices + on_device + of_optimizer


def test_adam_in_bf16_takes_14_bytes_an_element_and_2_more_on_the_way_of_none() -> None:
    units = pad_units([UnitGroup("w", 1 << 20, count=8)], 1)
    away = host_optimizer_bytes(units, replace(BF16, stage=1))
    assert away.host == 14 * (8 << 20)
    assert away.device_sums == 0


def test_a_second_set_takes_as_many_bytes_again() -> None:
    units = pad_units([UnitGroup("w", 1 << 20, count=8)], 1)
    ahead = replace(BF16, stage=1, steps_ahead=True)
    assert host_optimizer_bytes(units, ahead).host == 28 * (8 << 20)
    assert host_optimizer_bytes(units, replace(ahead, accumulation_steps=4)).host == 30 * (8 << 20)
    assert host_optimizer_bytes(units, replace(FP32, stage=1, steps_ahead=True)).host == 28 * (8 << 20)
    assert host_optimizer_bytes(units, replace(ahead, offload_optimizer="nvme")).second_states == 0
