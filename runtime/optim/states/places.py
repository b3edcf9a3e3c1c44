"""Where the elementwise states of an optimizer lie: one arena, and in it for each state what the masters look like.

A state of a unit is one flat buffer with the layout of the range that this rank owns of the unit, so who moves or saves
ranges moves and saves states alike. What they hold at first is the optimizer's business, except for Adam's zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...memory.arena import MOVED, STAYING, Arena, room_for
from ...memory.arenas import Arenas
from ...memory.host_pool import HostPool
from ...memory.pages import fresh_zeros
from ...protocols import OwnedRange
from .format import FP32_STATES, StateFormat


class StatePlaces(Protocol):
    """Places for states that are not always in memory; there must be some for all that are foreseen."""

    def state_places(self, index: int) -> list[list[Tensor]]:
        """Returns the buffers of a range's states: for each state those of its parts, see `StateFormat`."""
        ...

    def note_states(self, index: int) -> None:
        """Says that a range's states are about to get their first values."""
        ...


class StateAllocator(Protocol):
    """Places for states, as who makes states asks for them."""

    def form_of(self, owned: OwnedRange) -> StateFormat:
        """Returns how a range's states lie."""
        ...

    def place(self, owned: OwnedRange, name: str) -> Tensor | None:
        """Returns the buffer of a state, or of its codes or scales, as large as the range asks for.

        Args:
            owned: the range.
            name: name of a tensor of the state: the state's name, and a suffix for codes or scales; see
                `StateFormat.part_of`.

        Returns:
            None where there are more states than expected.
        """
        ...

    def buffers(self) -> list[Tensor]:
        """Returns the buffers of all states, padding included."""
        ...

    def vacate(self) -> None:
        """Forgets which state lies where: others will be placed."""
        ...


class RangeStateAllocator:
    """Places for the states of ranges that lie in one kind of memory.

    Args:
        counts: each range with the number of states of its elements.
        memory: arenas in which the places are reserved, on the masters' device, in the dtype the optimizer computes in
            or that of `form`.
        host: pool that makes the memory where masters lie in host memory apart from the device; None where they do not.
        away: separate places for states, by the number of the range; None where they are reserved here.
        form: format of the stored states; fp32 means the dtype that the optimizer computes in.
        suffix: behind the name of the arena, where there are others of its kind.
        moves: ranges may be taken out, see `give_up`.
    """

    def __init__(
        self,
        counts: Sequence[tuple[OwnedRange, int]],
        memory: Arenas,
        host: HostPool | None = None,
        *,
        away: StatePlaces | None = None,
        suffix: str = "",
        form: StateFormat = FP32_STATES,
        moves: bool = False,
    ) -> None:
        self._form = form
        self._arenas: list[Arena] = []
        self._away = away
        self._numbers = {id(owned): number for number, (owned, _) in enumerate(counts)}
        self._names: dict[int, list[str]] = {}
        if away is not None:
            self._places = {
                id(owned): away.state_places(number)[:count] for number, (owned, count) in enumerate(counts)
            }
            self.vacate()
            return
        first = counts[0][0].seen_master
        self._places = {id(owned): [list[Tensor]() for _ in range(count)] for owned, count in counts}
        for number, part in enumerate(form.parts):
            dtype = first.dtype if form is FP32_STATES else part.dtype
            numels = [form.place_numel(number, owned.master.numel()) for owned, _ in counts]
            arena = memory.reserve(
                f"{'scales of ' if number else ''}optimizer states{suffix}",
                sum(room_for([numel]) * count for numel, (_, count) in zip(numels, counts, strict=True)),
                partial(_zeros, dtype=dtype, device=first.device, host=host),
                tier="device" if host is None else "host",
                leaves=host is None,
                apart=moves,
            )
            self._arenas.append(arena)
            for numel, (owned, _) in zip(numels, counts, strict=True):
                for parts in self._places[id(owned)]:
                    parts.append(arena.take(numel))
        self.vacate()

    def form_of(self, owned: OwnedRange) -> StateFormat:
        """See `StateAllocator`."""
        return self._form

    def place(self, owned: OwnedRange, name: str) -> Tensor | None:
        """See `StateAllocator`."""
        names, places = self._names[id(owned)], self._places[id(owned)]
        state, part = self._form.part_of(name)
        if state not in names:
            if len(names) == len(places):
                return None
            names.append(state)
            if self._away is not None:
                self._away.note_states(self._numbers[id(owned)])
        return places[names.index(state)][part]

    def buffers(self) -> list[Tensor]:
        """See `StateAllocator`."""
        return [place for states in self._places.values() for parts in states for place in parts]

    def give_up(self, owned: OwnedRange) -> None:
        """Gives the memory of a range's states back: they are elsewhere now."""
        self._names.pop(id(owned))
        for parts in self._places.pop(id(owned)):
            for arena, place in zip(self._arenas, parts, strict=True):
                arena.give_back(place)
        for arena in self._arenas:
            arena.release()

    def count_of(self, owned: OwnedRange) -> int:
        """Returns how many states of a range there is room for."""
        return len(self._places[id(owned)])

    def vacate(self) -> None:
        """See `StateAllocator`."""
        self._names = {number: [] for number in self._places}


class _SplitStateAllocator:
    """Places in several kinds of memory, each for ranges of its own."""

    def __init__(self, parts: Sequence[tuple[Sequence[tuple[OwnedRange, int]], RangeStateAllocator]]) -> None:
        self._parts = [housing for _, housing in parts]
        self._by_range = {id(owned): housing for counts, housing in parts for owned, _ in counts}

    def form_of(self, owned: OwnedRange) -> StateFormat:
        return self._by_range[id(owned)].form_of(owned)

    def place(self, owned: OwnedRange, name: str) -> Tensor | None:
        return self._by_range[id(owned)].place(owned, name)

    def buffers(self) -> list[Tensor]:
        return [buffer for housing in self._parts for buffer in housing.buffers()]

    def vacate(self) -> None:
        for housing in self._parts:
            housing.vacate()

    def bring_in(self, moved: Sequence[OwnedRange], memory: Arenas) -> Callable[[], None]:
        """Gives ranges whose masters are on the device now places there, empty; see `move_here`."""
        counts = [(owned, self._by_range[id(owned)].count_of(owned)) for owned in moved]
        housing = RangeStateAllocator(counts, memory, suffix=MOVED)
        left = {id(owned): self._by_range[id(owned)] for owned in moved}
        self._parts.append(housing)
        self._by_range |= {id(owned): housing for owned in moved}

        def give_up() -> None:
            for owned in moved:
                left[id(owned)].give_up(owned)

        return give_up


def move_here(housing: StateAllocator | None, moved: Sequence[OwnedRange], memory: Arenas) -> Callable[[], None]:
    """Gives ranges whose masters have come from host memory to the device places for states there, empty.

    Args:
        housing: places that `house` made with `moves`; None where states lie where torch has put them.
        moved: the ranges.
        memory: arenas in which places are reserved.

    Returns:
        what gives the places in host memory back, once the states have left them.
    """
    if isinstance(housing, _SplitStateAllocator):
        return housing.bring_in(moved, memory)
    assert housing is None, "it was made for states that stay where they are"
    return lambda: None


def house(
    counts: Sequence[tuple[OwnedRange, int]],
    memory: Arenas,
    host: HostPool | None,
    *,
    away: StatePlaces | None,
    staying: Sequence[OwnedRange],
    form: StateFormat = FP32_STATES,
    moves: bool = False,
) -> StateAllocator:
    """Returns the places for the states of all ranges, wherever their masters lie.

    Args:
        counts: each range with the number of states of its elements.
        memory: arenas in which the places are reserved.
        host: pool that makes memory where masters lie in host memory apart from the device; None where all ranges stay.
        away: separate places for states of the ranges that leave, by their position among these; None for none.
        staying: ranges whose masters stay on the device although there is such host memory.
        form: format of the states that leave the device.
        moves: states in host memory may come to the device later.
    """
    stay = {id(owned) for owned in staying}
    if moves and not stay:
        return _SplitStateAllocator(
            [(counts, RangeStateAllocator(counts, memory, host, away=away, form=form, moves=True))]
        )
    if host is None or not stay:
        return RangeStateAllocator(counts, memory, host, away=away, form=form)
    there = [(owned, count) for owned, count in counts if id(owned) not in stay]
    here = [(owned, count) for owned, count in counts if id(owned) in stay]
    return _SplitStateAllocator(
        [
            (there, RangeStateAllocator(there, memory, host, away=away, form=form, moves=moves)),
            (here, RangeStateAllocator(here, memory, suffix=STAYING)),
        ]
    )


def _zeros(numel: int, *, dtype: torch.dtype, device: torch.device, host: HostPool | None) -> Tensor:
    if host is not None:
        return host.zeros(numel, dtype=dtype)
    return fresh_zeros(numel, dtype=dtype, device=device)


def adam_state_names(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns torch's names of the states that Adam and AdamW keep for each element of a group; zeros at first."""
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else []))


def adam_step_count(options: Mapping[str, Any], device: torch.device) -> Tensor:
    """Returns the count of steps that torch's Adam begins with: on the device for kernels that read it there."""
    wide = torch.get_default_dtype() == torch.float64 and not options["fused"]
    where = device if options["fused"] or options["capturable"] else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=where)
