"""Parameters are there between acquire and release, gathered as rarely as slots allow, and NaN where poison asks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.errors import ModelError
from dsrun.runtime.mesh.collectives import Pending
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.optim.groups import assign_groups
from dsrun.runtime.precision.policy import FP32
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.params.slots import turns_of
from dsrun.runtime.zero.params.slotted import SlottedStore
from dsrun.runtime.zero.params.store import ResidentStore
from dsrun.runtime.zero.units.find import find_units
from dsrun.runtime.zero.units.plan import ZeroPlan
from dsrun.runtime.zero.units.unit import ParamUnit
from support.models import TinyGPT

CPU = torch.device("cpu")


def model() -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(width=72, layers=3)


def units_of(m: nn.Module, collectives: LoopbackCollectives, stage: int = 3) -> list[ParamUnit]:
    groups = assign_groups(m, None).group_of
    return build_units(
        find_units(m), ZeroPlan.of_stage(stage), lambda _: collectives, precision=FP32, device=CPU, group_of=groups
    )


def values(unit: ParamUnit) -> list[torch.Tensor]:
    return [param.detach().clone() for param in unit.params]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_acquired_unit_has_its_values_and_the_model_keeps_no_others(size: int) -> None:
    expected = [p.detach().clone() for p in model().parameters()]
    models = [model() for _ in range(size)]  # here, for the random generator is not a thread's own

    def body(collectives: LoopbackCollectives) -> None:
        m = models[collectives.rank]
        units = units_of(m, collectives)
        assert all(param.numel() == 0 for param in m.parameters())
        store = SlottedStore(units, collectives)
        found: dict[int, torch.Tensor] = {}
        for _ in range(2):
            for unit in units:
                store.acquire(unit)
                found |= dict(zip(map(id, unit.params), values(unit), strict=True))
                store.release(unit)
            store.invalidate()
        assert all(torch.equal(found[id(p)], value) for p, value in zip(m.parameters(), expected, strict=True))

    LoopbackWorld(size).run(body)


def alone(
    poison: bool = False, budgets: GatherBudgets | None = None
) -> tuple[list[ParamUnit], SlottedStore, LoopbackCollectives]:
    collectives = LoopbackCollectives(LoopbackWorld(1), 0)
    units = units_of(model(), collectives)
    gathering = turns_of(units, budgets or GatherBudgets())
    store = build_store(units, ZeroPlan.of_stage(3), collectives, poison=poison, gathering=gathering)
    assert isinstance(store, SlottedStore)
    return units, store, collectives


def use(store: SlottedStore, order: list[ParamUnit]) -> None:
    for unit in order:
        store.acquire(unit)
        store.release(unit)


def test_addresses_never_change() -> None:
    units, store, _ = alone()
    before = [param.data_ptr() for unit in units for param in unit.params]
    for _ in range(3):
        use(store, [*units, *reversed(units)])
        store.invalidate()
    assert before == [param.data_ptr() for unit in units for param in unit.params]


class Recording(LoopbackCollectives):
    """Loopback of one rank that notes which memory is gathered into."""

    def __init__(self) -> None:
        super().__init__(LoopbackWorld(1), 0)
        self.gathered: list[int] = []

    def all_gather(self, output_N: torch.Tensor, shard_S: torch.Tensor, *, label: str = "") -> Pending:
        self.gathered.append(output_N.numel())
        return super().all_gather(output_N, shard_S, label=label)


def test_the_unit_expected_next_is_gathered_while_one_is_in_use() -> None:
    collectives = Recording()
    units = units_of(model(), collectives)
    store = SlottedStore(units, collectives)
    shared = [unit for unit in units if unit.module is not None]
    order = [*shared, *reversed(shared)]
    use(store, order)
    store.invalidate()
    collectives.gathered.clear()
    expected: list[int] = []
    for position, unit in enumerate(order):
        store.acquire(unit)
        upcoming = order[: position + 2]
        # The two units at the turn lie in the two slots already.
        there = {len(shared), len(shared) + 1}
        expected = [u.layout.padded_numel for i, u in enumerate(upcoming) if i not in there]
        assert collectives.gathered == expected
        store.release(unit)
    assert len(collectives.gathered) == len(order) - 2


def test_a_deviation_is_fetched_on_demand() -> None:
    units, store, _ = alone()
    shared = [unit for unit in units if unit.module is not None]
    use(store, shared)
    store.invalidate()
    expected = {unit.index: values(unit) for unit in shared if not store.acquire(unit) and not store.release(unit)}
    store.invalidate()
    for unit in (shared[2], shared[0], shared[0], shared[4], shared[1]):
        store.acquire(unit)
        assert all(torch.equal(a, b) for a, b in zip(values(unit), expected[unit.index], strict=True))
        store.release(unit)


def test_released_slots_hold_nan_under_poison_and_while_the_first_order_is_recorded() -> None:
    for poison in (False, True):
        units, store, _ = alone(poison)
        assert all(bool(param.isnan().all()) for unit in units for param in unit.params)
        use(store, units)
        assert bool(units[0].params[0].isnan().all())
        store.invalidate()
        use(store, units[:1])
        assert bool(units[0].params[0].isnan().all()) == poison
        store.acquire(units[0])
        store.acquire(units[0])
        store.release(units[0])
        assert not bool(units[0].params[0].isnan().any()), "nested uses keep it"
        store.release(units[0])


def test_two_units_of_one_slot_in_use_at_once_are_refused() -> None:
    units, store, _ = alone()
    store.acquire(units[0])
    store.acquire(units[1])
    with pytest.raises(ModelError, match=r"`blocks\.1` is needed while unit `embed` is still in use"):
        store.acquire(units[2])


def test_misuse_of_the_store_is_an_impossible_state() -> None:
    units, store, _ = alone()
    with pytest.raises(AssertionError, match="was not acquired"):
        store.release(units[0])
    store.acquire(units[0])
    with pytest.raises(AssertionError, match="in use during a step"):
        store.invalidate()
    store.release(units[0])
    store.invalidate()
    store.acquire(units[0])
    store.release(units[0])
    with pytest.raises(AssertionError, match="released twice"):
        store.release(units[0])


def test_below_stage_3_everything_is_resident() -> None:
    collectives = LoopbackCollectives(LoopbackWorld(1), 0)
    units = units_of(model(), collectives, stage=2)
    store = build_store(units, ZeroPlan.of_stage(2), collectives)
    assert isinstance(store, ResidentStore)
    assert store.always_there
    before = values(units[0])
    store.acquire(units[0])
    store.release(units[0])
    store.invalidate()
    assert all(torch.equal(a, b) for a, b in zip(values(units[0]), before, strict=True))
    assert collectives.traffic.calls["all_gather"] == 0


def test_without_prefetching_a_unit_is_gathered_when_it_is_needed_and_not_before() -> None:
    found: list[list[int]] = []
    for ahead in (None, 0):
        units, store, collectives = alone(budgets=GatherBudgets(ahead=ahead))
        blocks = [unit for unit in units if unit.module is not None]
        use(store, blocks)
        store.invalidate()
        gathers: list[int] = []
        for unit in blocks:
            before = collectives.traffic.calls["all_gather"]
            use(store, [unit])
            gathers.append(collectives.traffic.calls["all_gather"] - before)
        found.append(gathers)
    last = len(found[0]) - 2
    assert found == [[2, *[1] * last, 0], [1] * (last + 2)]


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_slots_are_filled_ahead_in_order_and_everything_is_there_when_it_is_needed(ahead: int) -> None:
    units, _, _ = alone()
    largest = max(unit.layout.padded_numel for unit in units if unit.module is not None)
    units, store, collectives = alone(poison=True, budgets=GatherBudgets(ahead=ahead * largest))
    shared = [unit for unit in units if unit.module is not None]
    order = [*shared, *reversed(shared)]
    use(store, order)
    store.invalidate()
    for step in range(2):
        gathered: list[int] = []
        for unit in order:
            before = collectives.traffic.calls["all_gather"]
            store.acquire(unit)
            assert not any(bool(value.isnan().any()) for value in values(unit))
            store.release(unit)
            gathered.append(collectives.traffic.calls["all_gather"] - before)
        assert gathered[0] == 1 + ahead, step
        store.invalidate()


def test_deeper_prefetch_gives_way_to_what_is_needed_sooner_and_to_a_deviation() -> None:
    expected = {unit.name: values(unit) for unit in units_of(model(), LoopbackCollectives(LoopbackWorld(1), 0), 2)}
    units, store, _ = alone(budgets=GatherBudgets(ahead=10**9))
    shared = [unit for unit in units if unit.module is not None]
    use(store, shared)
    store.invalidate()
    for unit in (shared[3], shared[0], shared[0], shared[4], shared[1], shared[2]):
        store.acquire(unit)
        assert all(torch.equal(a, b) for a, b in zip(values(unit), expected[unit.name], strict=True))
        store.release(unit)


def test_what_stays_is_gathered_once_a_step_and_keeps_its_values() -> None:
    units, store, collectives = alone(budgets=GatherBudgets(stay=10**6))
    blocks = [unit for unit in units if unit.module is not None]
    order = [*blocks, *reversed(blocks)] * 2
    use(store, order)
    store.invalidate()
    for _ in range(2):
        before = collectives.traffic.calls["all_gather"]
        use(store, order)
        assert collectives.traffic.calls["all_gather"] == before, "two micro steps gather nothing"
        for unit in blocks:
            unit.shard.add_(1.0)
        store.invalidate()
        assert collectives.traffic.calls["all_gather"] == before + len(blocks)
    store.acquire(blocks[0])
    assert torch.equal(blocks[0].flat_param, blocks[0].shard), "of the one rank, with its new values"


def in_chunks(collectives: LoopbackCollectives) -> tuple[list[ParamUnit], SlottedStore]:
    """One unit a chunk, all in one slot."""
    units = units_of(model(), collectives)
    shared = [unit for unit in units if unit.module is not None]
    chunk_of = {unit.index: number for number, unit in enumerate(shared)}
    gathering = turns_of(units, GatherBudgets(ahead=0), chunk_of=chunk_of)
    store = build_store(units, ZeroPlan.of_stage(3), collectives, gathering=gathering)
    assert isinstance(store, SlottedStore)
    return shared, store


def test_a_unit_that_is_kept_is_gathered_once_for_all_of_its_uses() -> None:
    collectives = Recording()
    (first, second, *_), store = in_chunks(collectives)
    for _ in range(2):
        collectives.gathered.clear()
        store.keep([first])
        use(store, [first, first, first])
        store.let_go([first])
        store.keep([second])
        use(store, [second, second])
        store.let_go([second])
        assert collectives.gathered == [first.layout.padded_numel, second.layout.padded_numel]
        store.invalidate()


def test_no_other_unit_lies_where_one_is_kept() -> None:
    (first, second, *_), store = in_chunks(LoopbackCollectives(LoopbackWorld(1), 0))
    store.keep([first])
    with pytest.raises(ModelError, match=f"`{second.name}` is needed while unit `{first.name}` is still in use"):
        store.acquire(second)
    copy = store.read(second, 0)
    assert copy.isfinite().all(), "what a script reads between uses is gathered elsewhere"
    use(store, [first])
    assert all(value.isfinite().all() for value in values(first)), "values stay between uses, also in the first step"
    store.let_go([first])
    assert all(value.isnan().all() for value in values(first)), "in the first step, what nobody keeps shows"
    with pytest.raises(AssertionError, match="let go twice"):
        store.let_go([first])
