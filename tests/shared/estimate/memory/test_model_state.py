"""Model state as the runtime allocates it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.config.show.explain import explain, find
from dsrun.estimate.memory.model_state import pad_units, state_bytes
from dsrun.estimate.model.units import UnitGroup
from dsrun.estimate.run.settings import RunSettings
from dsrun.runtime.layout.unit_layout import SHARD_ALIGN, lay_out
from dsrun.runtime.observe.memory import StatePrediction
from dsrun.runtime.zero.units.plan import ZeroPlan

BF16 = RunSettings(compute_bytes=2)
FP32 = RunSettings(compute_bytes=4)
PURE_BF16 = RunSettings(compute_bytes=2, master_bytes=2)


UNITS = (
    UnitGroup("embedding", 61 * 72),
    UnitGroup("blocks", 37_001, count=3),
    UnitGroup("head", 4_392),
    UnitGroup("rest", 1_017, has_module=False),
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "compute"), [(BF16, torch.bfloat16), (FP32, torch.float32), (PURE_BF16, torch.bfloat16)]
)
@pytest.mark.parametrize("states", [0, 1, 2])
def test_the_prediction_is_the_runtime_s_own_to_the_byte(
    ranks: int, stage: int, settings: RunSettings, compute: torch.dtype, states: int
) -> None:
    flat = [(unit.numel, unit.has_module) for unit in UNITS for _ in range(unit.count)]
    plan = ZeroPlan.of_stage(stage)
    theirs = StatePrediction(
        layouts=[lay_out("unit", [("w", (numel,))], world_size=ranks) for numel, _ in flat],
        has_module=[has_module for _, has_module in flat],
        compute=compute,
        master=torch.float32 if settings.master_bytes == 4 else torch.bfloat16,
        states_per_element=states,
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
        shard_parameters=plan.shard_parameters,
    )
    ours = state_bytes(pad_units(UNITS, ranks), replace(settings, stage=stage, states_per_element=states))
    assert ours.total == theirs.total_bytes()


def test_units_are_padded_to_slices_of_the_runtime_s_size() -> None:
    (unit,) = pad_units([UnitGroup("w", 1)], 3)
    assert (unit.padded, unit.shard) == (3 * SHARD_ALIGN, SHARD_ALIGN)


def test_tensor_parallel_ranks_share_a_unit_before_zero_cuts_it() -> None:
    (unit,) = pad_units([UnitGroup("w", 8 * 1024)], 2, tensor_parallel=4)
    assert (unit.padded, unit.shard) == (2048, 1024)


def test_what_is_repeated_is_whole_on_every_rank_and_no_unit_with_norms() -> None:
    blocks = UnitGroup("w", 8 * 1024, count=2, uncut=256, repeated=1024)
    numels = [(unit.numel, unit.role, unit.ranks) for unit in pad_units([blocks], 2, tensor_parallel=4)]
    cut = ((8 * 1024 - 256 - 1024) // 4, "shard", 2)
    assert numels == [cut, cut, (2 * 256, "replica", 8), (2 * 1024, "replica", 8)]
    apart = [(unit.numel, unit.role) for unit in pad_units([blocks], 2, tensor_parallel=4, by_block=True)]
    assert apart == [cut[:2]] * 2 + [(256, "replica")] * 2 + [(1024, "replica")] * 2
    assert [unit.numel for unit in pad_units([blocks], 2)] == [8 * 1024] * 2, "one rank has all of it in any case"


def test_at_stage_3_units_take_turns_in_two_slots() -> None:
    units = pad_units([UnitGroup("w", 1024, count=10), UnitGroup("rest", 512, has_module=False)], 2)
    state = state_bytes(units, replace(BF16, stage=3))
    assert state.gather_slots == (1024 + 1024 + 512) * 2
    assert state.parameters == (10 * 512 + 256) * 2


@pytest.mark.parametrize(("stage", "turns"), [(1, False), (2, True), (3, True)])
def test_sums_of_chunks_that_take_turns_share_memory_from_stage_2_on(stage: int, turns: bool) -> None:
    units = pad_units([UnitGroup("w", 1024, count=2), UnitGroup("w", 1024, count=2, chunk=1)], 2)
    cut = replace(BF16, stage=stage, axis_sizes={"pipe": 2}, once_an_update=True, accumulation_steps=8)
    of = {
        name: state_bytes(units, replace(cut, schedule=name, chunks_per_rank=2)).local_sums
        for name in ("interleaved", "breadth_first")
    }
    assert of == {"interleaved": 4 * 4096, "breadth_first": 4 * (2048 if turns else 4096)}


def test_in_fp32_the_parameters_are_the_masters() -> None:
    units = pad_units([UnitGroup("w", 1024)], 1)
    state = state_bytes(units, FP32)
    assert (state.masters, state.parameters, state.states) == (0, 4096, 8192)


def bytes_of_an_element(settings: RunSettings) -> str:
    """Returns what a parameter takes on N ranks, slots left out: `4 + 16/N`."""
    numel = 1 << 30

    def on(ranks: int) -> float:
        state = state_bytes(pad_units([UnitGroup("w", numel)], ranks), settings)
        return (state.total - state.gather_slots - state.gradient_slots) / numel

    cut = (on(2) - on(4)) * 4
    whole = on(2) - cut / 2
    parts = [f"{whole:g}"] if whole else []
    return " + ".join([*parts, f"{cut:g}/N"] if cut else parts)


def test_the_config_explains_stages_with_the_bytes_that_the_runtime_takes() -> None:
    zero, one, two, three = (bytes_of_an_element(replace(BF16, stage=stage)) for stage in range(4))
    (key,) = find("zero_optimization.stage")
    said = " ".join(explain(key).split())
    assert f"{zero} at stage 0, {one} at 1, {two} at 2, {three} at 3" in said


def test_frozen_parameters_cost_their_own_bytes_only() -> None:
    units = pad_units([UnitGroup("adapter", 256)], 1)
    assert state_bytes(units, BF16, frozen_numel=1000).total - state_bytes(units, BF16).total == 2000


def test_at_stage_3_frozen_parameters_of_units_are_cut_and_the_others_are_not() -> None:
    group = UnitGroup("block", 256, count=4, frozen=4 * 1024, frozen_numel=4000)
    units = pad_units([group, UnitGroup("rest", 512, has_module=False)], 2)
    total = 4 * 4000 + 100
    assert state_bytes(units, replace(BF16, stage=2), frozen_numel=total).frozen == 2 * total
    state = state_bytes(units, replace(BF16, stage=3), frozen_numel=total)
    assert state.frozen == 2 * (4 * 2048 + 100)
    assert state.gather_slots == 2 * (2 * (512 + 4096) + 512)
    assert state.gradient_slots == 2 * (512 + 512 + 512), "frozen parameters have no gradients"


def test_keys_of_gathering_change_what_a_plan_counts() -> None:
    units = pad_units([UnitGroup("block", 256, count=6, frozen=4096, frozen_numel=4096)], 1)
    usual = state_bytes(units, replace(BF16, stage=3), frozen_numel=6 * 4096)

    def with_keys(**keys: int) -> tuple[int, int]:
        settings = replace(BF16, stage=3, gather=GatherBudgets(**keys))
        state = state_bytes(units, settings, frozen_numel=6 * 4096)
        return (state.gather_slots - usual.gather_slots) // 2, (state.frozen - usual.frozen) // 2

    assert with_keys(ahead=0) == (-4352, 0)
    assert with_keys(ahead=3 * 4352) == (2 * 4352, 0)
    assert with_keys(ahead=3 * 4352, live=3 * 4352) == (4352, 0)
    assert with_keys(stay=256) == (2 * 4096 + 6 * 256 - 2 * 4352, 0)
