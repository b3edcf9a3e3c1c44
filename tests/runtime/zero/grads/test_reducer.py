"""Each unit's gradient is reduced once a micro step, in one order on all ranks, whatever completes when."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.memory.arena import Arena, ArenaUse, Zeros
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.mesh.collectives import Pending
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.precision.policy import BF16, FP32, PrecisionPolicy
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.grads.reducer import GradReducer
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.plan import ZeroPlan
from dsrun.runtime.zero.units.unit import ParamUnit

SIZES = (300, 700, 10, 513, 256)  # the last unit is the rest


class Recording(LoopbackCollectives):
    """Loopback that notes the sizes of reduced buffers."""

    def __init__(self, axis: LoopbackCollectives) -> None:
        super().__init__(axis._world, axis.rank)
        self.sizes: list[int] = []

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        self.sizes.append(buffer_N.numel())
        return super().reduce_scatter(buffer_N, label=label)

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        self.sizes.append(buffer_N.numel())
        return super().all_reduce(buffer_N, op=op, label=label)


def units_of(
    collectives: LoopbackCollectives,
    stage: int,
    precision: PrecisionPolicy = FP32,
    divide_before: float = 1.0,
    **options: Any,
) -> tuple[list[ParamUnit], GradReducer]:
    plan = ZeroPlan.of_stage(stage)
    modules: list[nn.Module | None] = [nn.Identity() for _ in SIZES[:-1]]
    specs = [
        UnitSpec(f"u{i}", module, ((f"u{i}.w", nn.Parameter(torch.zeros(size))),))
        for i, (size, module) in enumerate(zip(SIZES, [*modules, None], strict=True))
    ]
    groups = {id(param): 0 for spec in specs for _, param in spec.params}
    device = torch.device("cpu")
    units = build_units(specs, plan, lambda _: collectives, precision=precision, device=device, group_of=groups)
    build_store(units, plan, collectives)
    for unit in units:
        unit.divide_before = divide_before
    reducer = GradReducer(
        units, collectives, shard_optimizer=plan.shard_optimizer, shard_gradients=plan.shard_gradients, **options
    )
    return units, reducer


def gradient(unit: ParamUnit, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * unit.index + 10 * rank + seed)
    return torch.randn(unit.params[0].shape, generator=generator)


def owned_means(units: list[ParamUnit], size: int, seeds: list[int], without: dict[int, set[int]]) -> list[Tensor]:
    """What each rank's owned range should be: the mean over ranks, summed over micro steps."""
    found: list[Tensor] = []
    for unit in units:
        whole = torch.zeros(unit.layout.padded_numel)
        for seed in seeds:
            total = torch.zeros(unit.layout.numel)
            for rank in range(size):
                if unit.index not in without.get(rank, set()):
                    total = total + gradient(unit, rank, seed)
            whole[: unit.layout.numel] += total / size
        found.append(whole[slice(*unit.owned)])
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_order_of_completion_on_any_rank_gives_the_mean(stage: int, size: int) -> None:
    def body(plain: LoopbackCollectives) -> list[int]:
        collectives = Recording(plain)
        units, reducer = units_of(collectives, stage)
        shuffled = random.Random(size * 10 + collectives.rank)  # other ranks, other graphs
        without = {rank: {rank % 4} for rank in range(size)} if size > 1 else {}
        for micro_step in range(3):
            used = [unit for unit in units if unit.index not in without.get(collectives.rank, set())]
            shared = [unit for unit in used if unit.module is not None]
            reducer.begin(order=lambda first=[units[-1], *shared]: first, used=used)
            reducer.open(units[-1])
            shuffled.shuffle(shared)
            for unit in [*shared, units[-1]]:
                reducer.open(unit)
                grad = unit.params[0].grad
                assert grad is not None
                assert not bool(grad.any())
                if shuffled.random() < 0.3:
                    unit.params[0].grad = gradient(unit, collectives.rank, micro_step)  # as autograd makes a new one
                else:
                    grad += gradient(unit, collectives.rank, micro_step)
                if shuffled.random() < 0.7:
                    reducer.complete(unit)
            reducer.finish()
        seeds = [0, 1, 2]
        for unit, expected in zip(units, owned_means(units, size, seeds, without), strict=True):
            torch.testing.assert_close(unit.grad_sum, expected, rtol=1e-5, atol=1e-6)
        reducer.zero()
        reducer.settle()
        assert not any(bool(unit.grad_sum.any()) for unit in units)
        return collectives.sizes

    sizes = LoopbackWorld(size).run(body)
    assert all(found == sizes[0] for found in sizes)
    assert len(sizes[0]) == 3 * len(SIZES)


def test_sums_are_kept_in_fp32_where_gradients_are_bf16() -> None:
    collectives = LoopbackCollectives(LoopbackWorld(1), 0)
    units, reducer = units_of(collectives, 2, BF16)
    for value in (256.0, 1.0):  # 257 is no bf16 number
        reducer.begin(order=lambda: units, used=units)
        reducer.open(units[0])
        assert units[0].params[0].grad is not None
        assert units[0].params[0].grad.dtype == torch.bfloat16
        units[0].params[0].grad += value
        reducer.complete(units[0])
        reducer.finish()
    assert bool((units[0].grad_sum[: SIZES[0]] == 257.0).all())


def _mean_of_two(precision: PrecisionPolicy, stage: int, values: tuple[float, float], **options: Any) -> list[Tensor]:
    """Owned ranges of two ranks whose gradients are `values`, over two micro steps."""

    def body(collectives: LoopbackCollectives) -> Tensor:
        units, reducer = units_of(collectives, stage, precision, **options)
        for _ in range(2):
            reducer.begin(order=lambda: units, used=units)
            for unit in units:
                reducer.open(unit)
                assert unit.params[0].grad is not None
                unit.params[0].grad += values[collectives.rank]
                reducer.complete(unit)
            reducer.finish()
        return units[1].grad_sum[:100]

    return LoopbackWorld(2).run(body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_may_travel_in_another_dtype_than_their_own(stage: int) -> None:
    for found in _mean_of_two(BF16, stage, (256.0, 1.0), comm_dtype=torch.float32):
        assert bool((found == 257.0).all()), "no bf16 number"
    for found in _mean_of_two(BF16, stage, (256.0, 1.0)):
        assert bool((found == 256.0).all())
    for found in _mean_of_two(FP32, stage, (256.0, 1.0), comm_dtype=torch.bfloat16):
        assert bool((found == 256.0).all())


@pytest.mark.parametrize("divide_before", [2.0, 8.0])
def test_a_division_before_the_reduction_keeps_sums_in_range_and_the_mean_the_same(divide_before: float) -> None:
    for found in _mean_of_two(FP32, 2, (3.0, 5.0), divide_before=divide_before):
        assert bool((found == 8.0).all())
    largest = torch.finfo(torch.float16).max
    assert torch.isinf(_mean_of_two(FP32, 1, (largest, largest), comm_dtype=torch.float16)[0]).all()
    kept = _mean_of_two(FP32, 1, (largest, largest), comm_dtype=torch.float16, divide_before=divide_before)
    assert bool((kept[0] == 2 * largest).all())


def test_a_gradient_after_the_reduction_is_refused() -> None:
    collectives = LoopbackCollectives(LoopbackWorld(1), 0)
    units, reducer = units_of(collectives, 2)
    reducer.begin(order=lambda: [units[1], units[0]], used=[units[0]])
    reducer.open(units[0])
    reducer.complete(units[0])
    with pytest.raises(ModelError, match="a forward of `u0` from before the last"):
        reducer.open(units[0])


class Neighbour(Arenas):
    """Lets a test take memory beside the gradients."""

    shared: Arena

    def growing(self, name: str, zeros: Zeros) -> Arena:
        self.shared = super().growing(name, zeros)
        return self.shared


def moved_out(memory: Arenas) -> ArenaUse:
    return next(use for use in memory.report().arenas if use.name == "moved-out gradients")


def _interleaved(
    units: list[ParamUnit], reducer: GradReducer, *, between: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """One micro step in which units of one slot get gradients in turns; returns what each should have summed."""
    reducer.begin(order=lambda: units, used=units)
    for value in (1.0, 2.0):
        for unit in units:
            reducer.open(unit)
            assert unit.params[0].grad is not None
            unit.params[0].grad += value * (unit.index + 1)
        between()
    reducer.finish()
    return [torch.full((SIZES[unit.index],), 3.0 * (unit.index + 1)) for unit in units]


def test_gradients_that_had_to_leave_their_slots_take_the_same_memory_in_every_step() -> None:
    memory = Arenas()
    units, reducer = units_of(LoopbackCollectives(LoopbackWorld(1), 0), 2, memory=memory)
    reserved: list[int] = []
    for _ in range(4):
        for unit, expected in zip(units, _interleaved(units, reducer), strict=True):
            assert torch.equal(unit.grad_sum[: SIZES[unit.index]], expected)
        reducer.zero()
        memory.compact()
        use = moved_out(memory)
        assert (use.used_bytes, use.hole_bytes) == (0, 0)
        reserved.append(use.reserved_bytes)
    assert reserved == [(512 + 768) * 4] * 4, "units 0 and 1 of the four that share two slots"


def test_gradients_outside_of_their_slots_may_be_moved_while_nothing_travels() -> None:
    memory = Neighbour()
    units, reducer = units_of(LoopbackCollectives(LoopbackWorld(1), 0), 2, memory=memory)
    _interleaved(units, reducer)
    reducer.zero()
    memory.compact()
    theirs = [memory.shared.take(1)]
    holes: list[list[int]] = []

    def leave_a_hole_and_compact() -> None:
        if theirs:
            memory.shared.give_back(theirs.pop())
        before = memory.shared.use().hole_bytes
        memory.compact()
        holes.append([before, memory.shared.use().hole_bytes])

    expected = _interleaved(units, reducer, between=leave_a_hole_and_compact)
    for unit, whole in zip(units, expected, strict=True):
        assert torch.equal(unit.grad_sum[: SIZES[unit.index]], whole)
    assert holes[0] == [256 * 4, 0]


@pytest.mark.parametrize("stage", [1, 2])
def test_units_without_a_gradient_are_reduced_in_their_own_slot_where_it_is_free(stage: int) -> None:
    memory = Arenas()
    units, reducer = units_of(LoopbackCollectives(LoopbackWorld(1), 0), stage, memory=memory)
    for unit in units:
        unit.flat_grad.fill_(7.0)  # of an earlier step
    reducer.begin(order=lambda: units, used=[])
    reducer.finish()
    assert not any(bool(unit.grad_sum.any()) for unit in units)
    assert moved_out(memory).high_water_bytes == 0


def test_a_backward_that_raised_gives_back_what_its_gradients_took() -> None:
    memory = Arenas()
    units, reducer = units_of(LoopbackCollectives(LoopbackWorld(1), 0), 2, memory=memory)
    reducer.begin(order=lambda: units, used=units)
    for unit in units:
        reducer.open(unit)
    reducer.abandon()
    assert moved_out(memory).high_water_bytes > 0
    assert moved_out(memory).used_bytes == 0
    for unit, expected in zip(units, _interleaved(units, reducer), strict=True):
        assert torch.equal(unit.grad_sum[: SIZES[unit.index]], expected)
