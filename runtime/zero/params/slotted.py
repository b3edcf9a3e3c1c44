"""Parameters in slices, gathered unit by unit into slots (stage 3). Touches neither gradients nor the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor

from dsrun.choices.gather_plan import GatherBudgets, GatherPlan, plan_gathering
from dsrun.errors import ModelError

from ...memory.arenas import Arenas
from ...mesh.collectives import Collectives, Pending
from ..partition_parameters import ShardedParameter, ZeroParamStatus, memory_of
from ..units.released import ReleasedParameter
from ..units.tier import gather
from ..units.unit import ParamUnit, zeros_for
from .gather_log import GatherLog
from .order import EvaluatedOrder, RecordedOrder
from .slots import elements_of, in_dtype, views_of_slots
from .stale import StaleMarks


@dataclass(slots=True, eq=False)
class _Slot:
    """One slot.

    Attributes:
        turns: units share it; else its unit is the only one.
        occupant: unit whose parameters it has, or will have.
        missing: units whose present values are not in it, although they are the occupant's.
        users: acquires of the occupant that were not released.
        keepers: whoever keeps the occupant here, in use or not.
        pending: gathers under way.
    """

    turns: bool
    occupant: ParamUnit | None = None
    missing: tuple[ParamUnit, ...] = ()
    users: int = 0
    keepers: int = 0
    pending: list[Pending] = field(default_factory=list[Pending])

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending.clear()

    @property
    def is_taken(self) -> bool:
        """Whether no other unit may have it now."""
        return self.users > 0 or self.keepers > 0

    def vacate(self) -> None:
        self.occupant, self.missing = None, ()


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where some of a unit's parameters are when they are gathered.

    Attributes:
        slot: the slot.
        unit: unit that is acquired for these parameters.
        parts: units that are gathered into the slot: the unit itself, its `frozen`, or both.
    """

    slot: _Slot
    unit: ParamUnit
    parts: tuple[ParamUnit, ...]


class SlottedStore:
    """A rank holds its slices, and a few units at a time in full, see [Note: slots].

    The order in which units are acquired is recorded and replayed: while one unit computes, the next ones are gathered
    into the other slots. A unit out of order is gathered on demand, and the replay goes on behind it. Forwards without
    a backward (evaluation, generation) have an order of their own and leave that of the training step alone. All ranks
    must acquire the same units in the same order: a forward that takes other blocks on other ranks needs stage 2, or
    leaf modules (`zero/units/leaves.py`). The first backward refuses it; later on, ranks that differ are refused at the
    step or wait until the collectives' timeout.

    While the first order is recorded, released slots are filled with NaN: a weight that is used outside of its unit's
    forward then shows in the first loss.

    Frozen parameters are gathered and dropped with the trained ones of their module, into the same slot, by a gather of
    their own. They keep their values over steps, so a unit that still lies in its slot then has its trained ones
    gathered alone.

    Units that are whole outside of their slots (`GatheredParameters`) are read there by forwards without a gradient,
    which then enter no collective: ranks may run as many of them as each one wants, to generate say.

    Args:
        units: units that are acquired, in order of registration, each with its `frozen`; their parameters are bound to
            the slots here.
        collectives: ranks that have the same units, and gather them in the same order.
        plan: plan for these units: what stays gathered, and how many slots the others share (one slot: each unit is
            gathered when it is needed). None: nothing stays, and two slots, which lets one gather overlap one unit's
            compute.
        poison: fill a slot with NaN whenever its unit is released, so that a use after release shows. Costs a write,
            and a gather at every use.
        arenas: arenas that the slots are reserved in; None: in arenas of their own.
    """

    always_there = False
    changes = 0

    def __init__(
        self,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        *,
        plan: GatherPlan | None = None,
        poison: bool = False,
        arenas: Arenas | None = None,
    ) -> None:
        if plan is None:
            plan = plan_gathering([elements_of(unit) for unit in units], [False] * len(units), GatherBudgets())
        dtype, device = units[0].dtype, units[0].device
        arenas = Arenas() if arenas is None else arenas
        self._collectives = collectives
        self._device = device
        self._ahead = plan.ahead
        self.poison = poison
        self._order = RecordedOrder()
        self._evaluated = EvaluatedOrder()
        self._has_begun = False  # a training step's forward has acquired a unit
        self._is_recorded = False  # a whole step has been seen
        self._whole: set[int] = set()  # indices of parts that are whole outside of their slots
        self._readers: dict[int, int] = {}  # by a unit's index: how many acquired it there
        self._places: dict[int, tuple[_Place, ...]] = {}  # by a unit's index, in the order of `plan.cells`
        self._place_of: dict[int, _Place] = {}  # by the index of a part
        # A slice from elsewhere lands in its slot, and the peers read it there.
        parts = [part for unit in units for part in (unit, unit.frozen) if part is not None]
        lands = any(part.tier is not None for part in parts)
        zeros = zeros_for(parts, collectives) if lands else torch.zeros
        memory = views_of_slots(
            plan.slots,
            [cell.numel for cell in plan.cells],
            [units[cell.unit].dtype for cell in plan.cells],
            reserve=lambda n, label: arenas.reserve(
                "gather slots" + ("" if label == dtype else in_dtype(label)),
                n,
                lambda numel: zeros(numel, dtype=label, device=device),
            ),
        )
        slots: dict[int, _Slot] = {}
        whole: dict[int, Tensor] = {}
        parts_in: dict[int, list[ParamUnit]] = {}
        for cell, number, view in zip(plan.cells, plan.slots.slot_of, memory, strict=True):
            unit = units[cell.unit]
            parts = _parts(unit, trained=cell.trained, frozen=cell.frozen)
            place = _Place(slots.setdefault(number, _Slot(turns=cell.shares)), unit, parts)
            self._places[unit.index] = (*self._places.get(unit.index, ()), place)
            parts_in.setdefault(number, []).extend(parts)
            whole[number] = max(whole.get(number, view), view, key=Tensor.numel)
            start = 0
            for part in parts:
                self._place_of[part.index] = place
                part.bind_params(view.narrow(0, start, part.layout.padded_numel))
                start += part.layout.padded_numel
            # A read before the first gather is a parameter used outside its unit's forward: let it show.
            view.fill_(float("nan"))
        self._slots = list(slots.values())
        self._marks = [(slot, StaleMarks(whole[number], parts_in[number])) for number, slot in slots.items()]
        names = {part.index: part.name for places in self._places.values() for place in places for part in place.parts}
        self._log = GatherLog(names, collectives, device)

    def acquire(self, unit: ParamUnit, *, evaluating: bool = False) -> None:
        """See `ParamStore`. Enters an all-gather of what is not there, and of what is expected next.

        Raises:
            ModelError: another unit in the same slot is still in use.
        """
        if self._reads_whole(unit):
            if not self.is_there(unit):
                unit.show(ShardedParameter)
            self._readers[unit.index] = self._readers.get(unit.index, 0) + 1
            return
        turns = False
        begins = False
        for place in self._places[unit.index]:
            slot = place.slot
            if slot.occupant is not unit:
                if slot.is_taken:
                    assert slot.occupant is not None, "a slot in use has an occupant"
                    raise ModelError(
                        f"model: unit `{unit.name}` is needed while unit `{slot.occupant.name}` is still in use, "
                        "and both share a gather slot",
                        hint="call blocks one after the other, or set `zero_optimization.stage` to 2",
                    )
                slot.occupant, slot.missing = unit, place.parts
            if slot.missing:
                self._gather(slot)
            if slot.pending:
                slot.wait()
            begins |= not slot.users
            slot.users += 1
            turns |= slot.turns
        if begins:
            unit.show(ShardedParameter)
        self._has_begun |= unit.module is not None and not evaluating
        if turns:
            order = self._evaluated if evaluating else self._order
            self._prefetch(order.after(unit, self._ahead))

    def release(self, unit: ParamUnit) -> None:
        """See `ParamStore`. The data stays until another unit takes the slot. What was written to it is taken over."""
        if readers := self._readers.get(unit.index, 0):
            self._readers[unit.index] = readers - 1
            if not self.is_there(unit):
                unit.show(ReleasedParameter)
            return
        places = self._places[unit.index]
        for place in places:
            assert place.slot.occupant is unit, f"unit {unit.name} was not acquired"
            assert place.slot.users > 0, f"unit {unit.name} was released twice"
            place.slot.users -= 1
        if not places[0].slot.users:
            self._take_writes(unit)
            unit.show(ReleasedParameter)
        self._clear(places)

    def keep(self, units: Sequence[ParamUnit]) -> None:
        """See `ParamStore`. Enters an all-gather of what is not there; `acquire` waits for it."""
        for unit in units:
            for place in self._places[unit.index]:
                slot = place.slot
                if slot.occupant is not unit:
                    assert not slot.is_taken, (
                        f"{unit.name} is kept where {slot.occupant and slot.occupant.name} is in use"
                    )
                    slot.occupant, slot.missing = unit, place.parts
                if slot.missing:
                    self._gather(slot)
                slot.keepers += 1

    def let_go(self, units: Sequence[ParamUnit]) -> None:
        """See `ParamStore`."""
        for unit in units:
            for place in self._places[unit.index]:
                assert place.slot.keepers > 0, f"unit {unit.name} was let go twice"
                place.slot.keepers -= 1
            self._clear(self._places[unit.index])

    def _clear(self, places: Sequence[_Place]) -> None:
        """Fills with NaN what is not in use any more, where uses after a release are to show."""
        for place in places:
            slot = place.slot
            # What several stages gather together is gathered when all of them are there, and only then.
            if slot.is_taken or place.unit.placement.stages:
                continue
            if self.poison or (not self._is_recorded and not self._stays(place)):
                slot.wait()
                for part in place.parts:
                    part.flat_param.fill_(float("nan"))
                slot.vacate()

    def is_there(self, unit: ParamUnit) -> bool:
        """See `ParamStore`."""
        if self._readers.get(unit.index):
            return True
        return all(place.slot.occupant is unit and place.slot.users > 0 for place in self._places[unit.index])

    def read(self, unit: ParamUnit, position: int, *, evaluating: bool = False) -> Tensor:
        """See `ParamStore`: a copy, gathered into the unit's slot or, where that is in use, into memory of its own."""
        if self._reads_whole(unit):
            return memory_of(unit.gathered_params[position]).clone()
        of_frozen = position >= len(unit.params)
        part = unit.frozen if of_frozen and unit.frozen is not None else unit
        if any(place.slot.is_taken and place.slot.occupant is not unit for place in self._places[unit.index]):
            flat = torch.empty_like(part.flat_param)
            part.wait_update()
            gather(part, flat).wait()
            self._log.note(part.index)
            return part.views(flat)[position - len(unit.params) if of_frozen else position].clone()
        self.acquire(unit, evaluating=evaluating)
        copy = memory_of(unit.gathered_params[position]).clone()
        self.release(unit)
        return copy

    def invalidate(self) -> None:
        """See `ParamStore`. What is stale is marked with NaN, see [Note: stale values].

        Starts gathering what stays; that it is waited for is `acquire`'s business."""
        self.changes += 1
        for slot in self._slots:
            assert not slot.is_taken, "parameters are in use during a step"
            slot.wait()
        places = list(chain.from_iterable(self._places.values()))
        for place in places:
            slot = place.slot
            if slot.occupant is place.unit:
                slot.missing = tuple(part for part in place.parts if part.trains or part in slot.missing)
        for slot, marks in self._marks:
            valid = () if slot.occupant is None else self._place_in(slot).parts
            marks.put([part for part in valid if part not in slot.missing])
        for place in places:
            slot = place.slot
            if self._stays(place) and not self.poison:
                slot.occupant, slot.missing = place.unit, place.parts
                if place.unit.pending_update is None:
                    self._gather(slot)  # else it would wait for its values now
        self._order.restart()
        self._is_recorded |= self._has_begun

    def refresh(self, unit: ParamUnit) -> None:
        """See `ParamStore`. Enters an all-gather of a unit that is in use."""
        place = self._place_of[unit.index]
        slot = place.slot
        if slot.occupant is not place.unit:
            return
        slot.wait()
        if unit not in slot.missing:
            slot.missing = (*slot.missing, unit)
        if slot.users:
            self._gather(slot)
            slot.wait()

    def set_whole(self, unit: ParamUnit, whole: bool) -> None:
        """See `ParamStore`. A unit that is still in use goes on in its slot, which may enter an all-gather."""
        if whole:
            self._whole.add(unit.index)
            return
        self._whole.discard(unit.index)
        owner = self._place_of[unit.index].unit
        for _ in range(self._readers.pop(owner.index, 0)):
            self.acquire(owner, evaluating=True)

    def status(self, unit: ParamUnit) -> ZeroParamStatus:
        """See `ParamStore`: only between `acquire` and `release`, although data may stay in a slot for longer."""
        place = self._place_of[unit.index]
        slot = place.slot
        if slot.occupant is not place.unit:
            return ZeroParamStatus.NOT_AVAILABLE
        if slot.pending:
            return ZeroParamStatus.INFLIGHT
        return ZeroParamStatus.AVAILABLE if slot.users > 0 else ZeroParamStatus.NOT_AVAILABLE

    def stays(self, unit: ParamUnit) -> bool:
        """See `ParamStore`."""
        return self._stays(self._place_of[unit.index])

    def take_fingerprint(self) -> int:
        """See `ParamStore`."""
        return self._log.take()

    def refuse_order(self, at: str) -> NoReturn:
        """See `ParamStore`."""
        self._log.refuse(at)

    def check_same_order(self) -> None:
        """See `ParamStore`; one all-reduce of two numbers."""
        taken = self.take_fingerprint()
        bounds = torch.tensor([taken, -taken], device=self._device)
        self._collectives.all_reduce(bounds, op="max", label="gather order").wait()
        with self._collectives.reading("gather order"):
            largest, negated_smallest = bounds.tolist()
        if largest != -negated_smallest:
            self._log.refuse()

    def _reads_whole(self, unit: ParamUnit) -> bool:
        """Whether a forward reads all of a unit outside of its slots."""
        if not self._whole or torch.is_grad_enabled():
            return False
        return all(part.index in self._whole for place in self._places[unit.index] for part in place.parts)

    def _take_writes(self, unit: ParamUnit) -> None:
        """Hands on what a script has written where the unit is gathered."""
        for part in (unit, unit.frozen):
            if part is not None and part.on_write is not None and (written := part.writes.take()):
                part.on_write(part, written)

    def _prefetch(self, upcoming: Sequence[ParamUnit]) -> None:
        """Gathers units ahead of their use, as far as none of them needs the slot of one that is needed sooner."""
        taken: dict[int, ParamUnit] = {}
        for unit in upcoming:
            place = self._places[unit.index][0]
            slot = place.slot
            if taken.setdefault(id(slot), unit) is not unit:
                return
            if slot.occupant is not unit:
                if slot.is_taken:
                    return
                slot.occupant, slot.missing = unit, place.parts
            if slot.missing:
                self._gather(slot)

    def _gather(self, slot: _Slot) -> None:
        slot.wait()
        for part in slot.missing:
            part.wait_update()
            slot.pending.append(gather(part, part.flat_param))
            self._log.note(part.index)
        slot.missing = ()

    def _place_in(self, slot: _Slot) -> _Place:
        assert slot.occupant is not None, "an empty slot has no place"
        return next(place for place in self._places[slot.occupant.index] if place.slot is slot)

    def _stays(self, place: _Place) -> bool:
        """Whether a place of a unit with a module is nobody else's."""
        return not place.slot.turns and place.unit.module is not None


def _parts(unit: ParamUnit, *, trained: bool, frozen: bool) -> tuple[ParamUnit, ...]:
    """Returns what lies in a cell of `unit`, which is frozen itself or may have a frozen unit beside it."""
    if not unit.trains:
        return (unit,)
    beside = (unit.frozen,) if frozen and unit.frozen is not None else ()
    return (unit, *beside) if trained else beside
