"""Gradients of whole units, summed up over micro steps on one rank until one reduction an update takes them.

How and when they are reduced is decided in `reducer.py`; where the reduced ones go, in `sums.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsrun.choices.gather_plan import sets_of_chunks, slots_of_chunks

from ...memory.arena import room_for
from ...memory.arenas import Arenas
from ...mesh.sums import add_scaled, set_scaled
from ..units.unit import ParamUnit


class FurtherUses(Protocol):
    """Uses of parameters that get gradients of their own, which are added to the parameters' sums once an update.

    Attributes:
        has_any: whether a micro step has given gradients since they were added.
    """

    @property
    def has_any(self) -> bool:
        """See the class."""
        ...

    def take(self, factor: float) -> None:
        """Adds `factor` times the gradients that a micro step has left to the sums of their uses, in fp32."""
        ...

    def give(self) -> list[tuple[int, int, Tensor]]:
        """Returns the sums of all uses, and forgets them: index of the unit, first element there, fp32 and flat."""
        ...

    def add_to(self, index: int, start: int, part_N: Tensor) -> None:
        """Adds what `give` would return of some elements of a unit, from `start` on."""
        ...

    def drop_strays(self) -> None:
        """Forgets gradients that no micro step has taken."""
        ...

    def forget(self) -> None:
        """Forgets all sums."""
        ...


class LocalSums:
    """fp32 sums, one a unit, of which this rank alone has contributed.

    fp32 gradients with a buffer of their own are summed up by autograd itself, in that buffer, which is *kept* from
    micro step to micro step. A unit that is owned whole is summed up where its reduced gradient will lie. The others
    take 4 bytes an element; where chunks take turns, see [Note: turns of chunks] in `dsrun.choices.gather_plan`, those
    of a chunk lie where those of another one did, whose reduction has ended.

    Args:
        units: units whose gradients are summed up here.
        in_place: whether a unit's `grad_sum` may be used for it.
        keeps: whether each unit has a gradient buffer of its own.
        device: device of the gradients.
        memory: arenas that the sums are reserved in.
        chunk_of: position of the chunk of each unit that one chunk alone uses, by the unit's index, where chunks take
            turns.
    """

    def __init__(
        self,
        units: Iterable[ParamUnit],
        *,
        in_place: bool,
        keeps: bool,
        device: torch.device,
        memory: Arenas,
        chunk_of: Mapping[int, int] | None = None,
    ) -> None:
        units = list(units)
        kept = {unit.index: unit.flat_grad for unit in units if keeps and unit.flat_grad.dtype == torch.float32}
        self._kept = frozenset(kept)
        shared = {unit.index: unit.grad_sum for unit in units if in_place and _is_whole(unit)} | kept
        apart = [unit for unit in units if unit.index not in shared]
        self._sums: dict[int, Tensor] = dict(shared)
        self._begun: set[int] = set()
        slot_of = _slots_of(apart, chunk_of or {})
        numels: dict[int, int] = {}
        for unit in apart:
            slot = slot_of[unit.index]
            numels[slot] = max(numels.get(slot, 0), unit.layout.padded_numel)
        #: Bytes of the sums that lie apart.
        self.nbytes = sum(numels.values()) * torch.float32.itemsize
        self._slot_of = slot_of
        self._holder: dict[int, int] = {}  # by a slot: the unit whose sum was begun there last
        if apart:
            room = memory.reserve(
                "gradients summed here",
                room_for(list(numels.values())),
                lambda numel: torch.zeros(numel, dtype=torch.float32, device=device),
            )
            slots = {slot: room.take(numel) for slot, numel in numels.items()}
            for unit in apart:
                self._sums[unit.index] = slots[slot_of[unit.index]].narrow(0, 0, unit.layout.padded_numel)

    def __contains__(self, index: int) -> bool:
        """Whether a unit is summed up here."""
        return index in self._sums

    def occupy(self, index: int) -> int | None:
        """Takes the memory of a unit's sum, before it is added to; returns the unit that had it before, if another had.

        The reduction of that one has to end first.
        """
        slot = self._slot_of.get(index)
        if slot is None or (before := self._holder.get(slot)) == index:
            return None
        assert before is None or before not in self._begun, "a sum was begun where one waits for its reduction"
        self._holder[slot] = index
        return before

    @property
    def has_kept(self) -> bool:
        """Whether a gradient buffer holds a sum."""
        return bool(self._begun & self._kept)

    @property
    def has_any(self) -> bool:
        """Whether there are sums that no reduction has taken."""
        return bool(self._begun)

    @property
    def begun(self) -> frozenset[int]:
        """Numbers of the units with sums that no reduction has taken."""
        return frozenset(self._begun)

    def buffers(self) -> list[Tensor]:
        """Returns the memory of all sums; not to be written to."""
        return list(self._sums.values())

    def keeps(self, index: int) -> bool:
        """Whether a unit's gradient buffer holds a sum, which the next micro step adds to."""
        return index in self._begun and index in self._kept

    def divide_kept(self, factor: float) -> None:
        """Divides all sums in gradient buffers by a factor, which `add` will multiply them by."""
        for index in self._begun & self._kept:
            self._sums[index].div_(factor)

    def add(self, index: int, flat_N: Tensor, factor: float) -> None:
        """Adds `factor * flat_N` to a unit's sum, in fp32; of a kept buffer, says that it has been added to."""
        if index in self._kept:
            if factor != 1.0:
                self._sums[index].mul_(factor)
            self._begun.add(index)
            return
        (add_scaled if index in self._begun else set_scaled)(self._sums[index], flat_N, factor)
        self._begun.add(index)

    def add_at(self, index: int, start: int, part_N: Tensor) -> None:
        """Adds to a part of a unit's sum."""
        if index not in self._begun:
            self._sums[index].zero_()
            self._begun.add(index)
        self._sums[index].narrow(0, start, part_N.numel()).add_(part_N)

    def read(self, index: int) -> Tensor | None:
        """Returns a unit's sum; None where nothing was added. Not to be written to."""
        return self._sums[index] if index in self._begun else None

    def take(self, index: int) -> Tensor:
        """Returns a unit's sum for its reduction, zeros where nothing was added, and forgets it."""
        total = self._sums[index]
        if index not in self._begun:
            total.zero_()
        self._begun.discard(index)
        return total

    def forget(self) -> None:
        """Forgets all sums."""
        self._begun.clear()


def _slots_of(units: Sequence[ParamUnit], chunk_of: Mapping[int, int]) -> dict[int, int]:
    """Returns by a unit's index the number of the memory that its sum lies in."""
    numels = [unit.layout.padded_numel for unit in units]
    slots = slots_of_chunks(
        numels, [chunk_of.get(unit.index) for unit in units], sets_of_chunks(len({*chunk_of.values()}))
    )
    return {unit.index: slot for unit, slot in zip(units, slots, strict=True)}


def _is_whole(unit: ParamUnit) -> bool:
    return unit.grad_sum.numel() == unit.layout.padded_numel and unit.grad_sum.dtype == torch.float32
