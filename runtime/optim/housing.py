"""Where the elementwise states of an optimizer lie: one arena, and in it for each state what the masters look like.

A state of a unit is one flat buffer with the layout of the range that this rank owns of the unit, so who moves or saves
ranges moves and saves states alike. What they hold at first is the optimizer's business, except for Adam's zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..memory.arena import room_for
from ..memory.arenas import Arenas
from ..memory.host_pool import HostPool
from ..memory.pages import fresh_zeros
from ..protocols import OwnedRange


class StatePlaces(Protocol):
    """Places for states that are not always in memory; there must be some for all that are foreseen."""

    def state_places(self, index: int) -> list[Tensor]:
        """Returns the buffers of a range's states, each as large as the range."""
        ...

    def note_states(self, index: int) -> None:
        """Says that a range's states are about to get their first values."""
        ...


class StateHousing:
    """Places for the states of all ranges.

    Args:
        counts: each range with the number of states of its elements.
        memory: where they are reserved, in the dtype the optimizer computes in and on the masters' device.
        host: makes that memory where the masters lie in host memory apart from the device; None: they do not.
        away: has places of its own for states, by the number of the range; None: they are reserved here.
    """

    def __init__(
        self,
        counts: Sequence[tuple[OwnedRange, int]],
        memory: Arenas,
        host: HostPool | None = None,
        *,
        away: StatePlaces | None = None,
    ) -> None:
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
        arena = memory.reserve(
            "optimizer states",
            sum(room_for([owned.master.numel()]) * count for owned, count in counts),
            lambda numel: _zeros(numel, first, host),
            tier="device" if host is None else "host",
            leaves=host is None,
        )
        self._places = {id(owned): [arena.take(owned.master.numel()) for _ in range(count)] for owned, count in counts}
        self.vacate()

    def place(self, owned: OwnedRange, name: str) -> Tensor | None:
        """Returns the buffer of a range's state, as large as the range; None where there are more than expected."""
        names, places = self._names[id(owned)], self._places[id(owned)]
        if name not in names:
            if len(names) == len(places):
                return None
            names.append(name)
            if self._away is not None:
                self._away.note_states(self._numbers[id(owned)])
        return places[names.index(name)]

    def buffers(self) -> list[Tensor]:
        """Returns the buffers of all states, padding included."""
        return [place for places in self._places.values() for place in places]

    def vacate(self) -> None:
        """Forgets which state lies where: others will be placed."""
        self._names = {number: [] for number in self._places}


def _zeros(numel: int, master: Tensor, host: HostPool | None) -> Tensor:
    if host is not None:
        return host.zeros(numel, dtype=master.dtype)
    return fresh_zeros(numel, dtype=master.dtype, device=master.device)


def adam_state_names(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns torch's names of the states that Adam and AdamW keep for each element of a group; zeros at first."""
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else []))


def adam_step_count(options: Mapping[str, Any], device: torch.device) -> Tensor:
    """Returns the count of steps that torch's Adam begins with: on the device for kernels that read it there."""
    wide = torch.get_default_dtype() == torch.float64 and not options["fused"]
    where = device if options["fused"] or options["capturable"] else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=where)
