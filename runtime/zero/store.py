"""Where a unit's parameters are when its forward or backward needs them.

`ResidentStore` (stages 0 to 2): always there. `SlottedStore` (stage 3): gathered into a slot on demand, with prefetch
in the recorded order. Neither touches gradients or the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ..mesh.collectives import Collectives, Pending
from .partition_parameters import ZeroParamStatus
from .slots import allocate_slots
from .unit import ParamUnit


class ParamStore(Protocol):
    """What the hooks ask for.

    Attributes:
        always_there: parameters may be read at any time, `acquire` or not.
    """

    always_there: bool

    def acquire(self, unit: ParamUnit, *, evaluating: bool = False) -> None:
        """Returns when the unit's parameters may be read, until `release`. May be nested.

        Args:
            unit: the unit.
            evaluating: the forward has no backward to come, so it says nothing about the order of a training step.
        """
        ...

    def release(self, unit: ParamUnit) -> None:
        """Ends one `acquire`."""
        ...

    def is_there(self, unit: ParamUnit) -> bool:
        """Whether the unit's parameters may be read now, without an `acquire`."""
        ...

    def read(self, unit: ParamUnit, position: int) -> Tensor:
        """Returns the values of the unit's parameter number `position`, which stay; may enter an all-gather."""
        ...

    def invalidate(self) -> None:
        """The shards have new values: what was gathered before is stale."""
        ...

    def refresh(self, unit: ParamUnit) -> None:
        """The shard of this unit alone has new values; every rank must call."""
        ...

    def status(self, unit: ParamUnit) -> ZeroParamStatus:
        """Whether the unit's parameters may be read now."""
        ...

    def check_same_order(self) -> None:
        """Raises where ranks have gathered different units since the last check; every rank must call."""
        ...


class ResidentStore:
    """Every rank holds every parameter all the time."""

    always_there = True

    def acquire(self, unit: ParamUnit, *, evaluating: bool = False) -> None:
        """See `ParamStore`: nothing to do."""

    def release(self, unit: ParamUnit) -> None:
        """See `ParamStore`: nothing to do."""

    def is_there(self, unit: ParamUnit) -> bool:
        """See `ParamStore`."""
        return True

    def read(self, unit: ParamUnit, position: int) -> Tensor:
        """See `ParamStore`: the parameter's own memory."""
        return unit.params[position].detach()

    def invalidate(self) -> None:
        """See `ParamStore`: the publisher writes new values in place."""

    def refresh(self, unit: ParamUnit) -> None:
        """See `ParamStore`: who changes the shard of a unit that is whole changes the whole."""

    def status(self, unit: ParamUnit) -> ZeroParamStatus:
        """See `ParamStore`: always."""
        return ZeroParamStatus.AVAILABLE

    def check_same_order(self) -> None:
        """See `ParamStore`: nothing is gathered."""


@dataclass(slots=True)
class _Slot:
    occupant: ParamUnit | None = None
    users: int = 0
    pending: Pending | None = None


class SlottedStore:
    """A rank holds its slices, and a few units at a time in full, see [Note: slots].

    The order in which units are acquired is recorded and replayed: while one unit computes, the next one is gathered
    into another slot. A unit out of order is gathered on demand, and the replay goes on behind it. Forwards without a
    backward (evaluation, generation) have an order of their own and leave that of the training step alone. All ranks
    must acquire the same units in the same order: a forward that takes other blocks on other ranks needs stage 2, or
    leaf modules (`leaves.py`). The first backward refuses it; later on, ranks that differ are refused at the step or
    wait until the collectives' timeout.

    While the first order is recorded, released slots are filled with NaN: a weight that is used outside of its unit's
    forward then shows in the first loss.

    Args:
        units: all units of the model; their parameters are bound to the slots here.
        collectives: the axis the shards lie on.
        slot_count: slots that the units with modules share; 2 lets one gather overlap one unit's compute.
        prefetch: gather the unit that is expected next while one computes; else each only when it is needed.
        poison: fill a slot with NaN whenever its unit is released, so that a use after release shows. Costs a write,
            and a gather at every use.
    """

    always_there = False

    def __init__(
        self,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        *,
        slot_count: int = 2,
        prefetch: bool = True,
        poison: bool = False,
    ) -> None:
        first = units[0].shard
        placed = allocate_slots(
            units, count=slot_count, zeros=lambda n: torch.zeros(n, dtype=first.dtype, device=first.device)
        )
        self._collectives = collectives
        self._device = first.device
        slots = {number: _Slot() for number, _ in placed}
        self._slots = list(slots.values())
        self._slot_of = [slots[number] for number, _ in placed]
        self.poison = poison
        self._prefetches = prefetch
        self._order = _RecordedOrder()
        self._evaluated: ParamUnit | None = None  # last, since the parameters have their present values
        self._evaluated_after: dict[int, ParamUnit] = {}
        self._fingerprint = 0  # of the units gathered since the last check, in order
        for unit, (_, memory) in zip(units, placed, strict=True):
            unit.bind_params(memory)
        # A read before the first gather is a parameter used outside its unit's forward: let it show.
        for _, memory in placed:
            memory.fill_(float("nan"))

    def acquire(self, unit: ParamUnit, *, evaluating: bool = False) -> None:
        """See `ParamStore`. Enters an all-gather of the unit unless it is there, and one of the unit expected next.

        Raises:
            ModelError: another unit in the same slot is still in use.
        """
        slot = self._slot_of[unit.index]
        if slot.occupant is not unit:
            if slot.users:
                assert slot.occupant is not None, "a slot in use has an occupant"
                raise ModelError(
                    f"model: unit `{unit.name}` is needed while unit `{slot.occupant.name}` is still in use, "
                    "and both share a gather slot",
                    hint="call blocks one after the other, or set `zero_optimization.stage` to 2",
                )
            self._gather(unit, slot)
        if slot.pending is not None:
            slot.pending.wait()
            slot.pending = None
        slot.users += 1
        if unit.module is None:
            return
        following = self._follow_evaluation(unit) if evaluating else self._order.next_after(unit)
        if following is not None and self._prefetches:
            self._prefetch(following)

    def release(self, unit: ParamUnit) -> None:
        """See `ParamStore`. The data stays until another unit takes the slot."""
        slot = self._slot_of[unit.index]
        assert slot.occupant is unit, f"unit {unit.name} was not acquired"
        assert slot.users > 0, f"unit {unit.name} was released twice"
        slot.users -= 1
        if slot.users == 0 and (self.poison or not self._order.is_recorded):
            unit.flat_param.fill_(float("nan"))
            slot.occupant = None

    def is_there(self, unit: ParamUnit) -> bool:
        """See `ParamStore`."""
        slot = self._slot_of[unit.index]
        return slot.occupant is unit and slot.users > 0

    def read(self, unit: ParamUnit, position: int) -> Tensor:
        """See `ParamStore`: a copy, gathered into the unit's slot or, where that is in use, into memory of its own."""
        slot = self._slot_of[unit.index]
        if slot.users and slot.occupant is not unit:
            flat = torch.empty_like(unit.flat_param)
            self._collectives.all_gather(flat, unit.shard, of=unit.label).wait()
            self._note_gather(unit)
            return unit.views(flat)[position].clone()
        self.acquire(unit)
        copy = unit.params[position].detach().clone()
        self.release(unit)
        return copy

    def invalidate(self) -> None:
        """See `ParamStore`."""
        for slot in self._slots:
            assert slot.users == 0, "parameters are in use during a step"
            if slot.pending is not None:
                slot.pending.wait()
                slot.pending = None
            slot.occupant = None
        self._order.restart()

    def refresh(self, unit: ParamUnit) -> None:
        """See `ParamStore`. Enters an all-gather of a unit that is in use, or that calls past the engine read."""
        slot = self._slot_of[unit.index]
        if slot.occupant is not unit:
            return
        if slot.pending is not None:
            slot.pending.wait()
            slot.pending = None
        slot.occupant = None
        if slot.users or unit.module is None:
            self._gather(unit, slot)
            assert slot.pending is not None, "a gather has just begun"
            slot.pending.wait()
            slot.pending = None

    def status(self, unit: ParamUnit) -> ZeroParamStatus:
        """See `ParamStore`: only between `acquire` and `release`, although data may stay in a slot for longer."""
        slot = self._slot_of[unit.index]
        if slot.occupant is unit and slot.pending is not None:
            return ZeroParamStatus.INFLIGHT
        held = slot.occupant is unit and slot.users > 0
        return ZeroParamStatus.AVAILABLE if held else ZeroParamStatus.NOT_AVAILABLE

    def check_same_order(self) -> None:
        """See `ParamStore`; one all-reduce of two numbers.

        Ranks that call different blocks of one size would mix their weights without any error of the collectives.

        Raises:
            ModelError: on every rank.
        """
        bounds = torch.tensor([self._fingerprint, -self._fingerprint], device=self._device)
        self._collectives.all_reduce(bounds, op="max", of="gather order").wait()
        largest, smallest = bounds.tolist()
        self._fingerprint = 0
        if largest != -smallest:
            raise ModelError(
                "model: the ranks called its blocks in different orders, so at stage 3 they gathered different weights",
                hint="call the same blocks on every rank, make what chooses between them one of "
                "`zero_optimization.leaf_module`, or set `zero_optimization.stage` to 2",
            )

    def _prefetch(self, unit: ParamUnit) -> None:
        slot = self._slot_of[unit.index]
        if slot.users == 0 and slot.occupant is not unit:
            self._gather(unit, slot)

    def _gather(self, unit: ParamUnit, slot: _Slot) -> None:
        if slot.pending is not None:
            slot.pending.wait()
        slot.pending = self._collectives.all_gather(unit.flat_param, unit.shard, of=unit.label)
        self._note_gather(unit)
        slot.occupant = unit

    def _note_gather(self, unit: ParamUnit) -> None:
        self._fingerprint = crc32(unit.index.to_bytes(8, "little"), self._fingerprint)

    def _follow_evaluation(self, unit: ParamUnit) -> ParamUnit | None:
        """Notes that a forward without a backward needs `unit`; returns the unit that came after it the last time.

        In such forwards, unlike in a training step, a unit is followed by the same one every time, also where a text
        is generated and nobody knows how many forwards there will be.
        """
        if self._evaluated is not None and self._evaluated is not unit:
            self._evaluated_after[self._evaluated.index] = unit
        self._evaluated = unit
        return self._evaluated_after.get(unit.index)


class _RecordedOrder:
    """The sequence of acquired units of one step, and where in it we are."""

    def __init__(self) -> None:
        self._recorded: list[ParamUnit] = []
        self._seen: list[ParamUnit] = []
        self._position = 0

    @property
    def is_recorded(self) -> bool:
        """Whether a whole step has been seen."""
        return bool(self._recorded)

    def next_after(self, unit: ParamUnit) -> ParamUnit | None:
        """Notes that `unit` was acquired; returns the unit that the recorded step acquired after it."""
        self._seen.append(unit)
        try:
            self._position = self._recorded.index(unit, self._position) + 1
        except ValueError:
            return None
        return self._recorded[self._position] if self._position < len(self._recorded) else None

    def restart(self) -> None:
        """A step has ended: what it did is what the next one is expected to do."""
        self._recorded, self._seen, self._position = self._seen, [], 0
