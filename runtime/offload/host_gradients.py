"""Reduced gradients on their way to host memory: once a step, in the dtype in which they travelled between ranks.

Implements zero's `GradSums` without knowing units: ranges have numbers. Who steps on them:
`offload/step/cpu_optimizer.py`.

[Note: once over the bus]
Where a step has one micro step, a gradient leaves the device as soon as it is reduced, as it is (bf16), into a buffer
that the host keeps for it; the device keeps only the norms of its blocks. It is multiplied by 1 / ranks on the host,
which changes no bit where that is a power of two, and is done in fp32 before everything else where it is not. In fp32
the device does it, in place.
Where micro steps are added up, that happens in fp32 on the device, and the sums leave it when the step comes to them,
through two buffers. A step that adds up though none was announced (`set_train_batch_size`, two backwards a step), or
whose gradients a script edits, brings back what has left and goes on like that.
Where ranges are stepped ahead (`offload/ahead/speculation.py`), sums have host buffers of their own, and leave the
device as soon as the last micro step has been added.

[Note: same bits] Norms are taken of the very numbers that an optimizer on the device would have seen: piece by piece,
in fp32 and divided by the ranks. A power of two is not taken out of the norm afterwards: squares may underflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..memory.arena import Arena, room_for
from ..memory.arenas import Arenas
from ..memory.bus import Bus, Event
from ..memory.host_pool import HostPool
from ..memory.pages import fresh_zeros
from ..mesh.collectives import Pending
from ..mesh.sums import add_scaled, set_scaled
from ..optim.norm import block_norms

#: Elements whose fp32 values stand beside a 16-bit gradient at once, while norms are taken of them.
_NORM_NUMEL = 1 << 22
#: Host buffers for sums on their way out: one is stepped on while the next fills.
RING = 2


@dataclass(slots=True, eq=False)
class _Sent:
    """A gradient that has left the device: when it is there, and what it is still to be multiplied by."""

    event: Event | None
    factor: float


@dataclass(frozen=True, slots=True)
class _Copying:
    """A copy that reads a gradient, for who wants its memory."""

    bus: Bus
    event: Event

    def wait(self) -> None:
        """See `Pending`."""
        self.bus.wait(self.event)


@dataclass(frozen=True, slots=True)
class HostGradient:
    """A range's gradient in host memory.

    Attributes:
        values_N: flat; may be overwritten once it has been stepped on.
        factor: factor to multiply the values by, a power of two.
    """

    values_N: Tensor
    factor: float


class GradientListener(Protocol):
    """Wants to know when gradients come, and go; called by the thread that trains."""

    def arrives(self, index: int) -> None:
        """A range's gradient will not change before its step, and is on its way to the host."""
        ...

    def changes(self, index: int) -> None:
        """It will all the same: returns when nobody reads it."""
        ...


class HostGradients:
    """See [Note: once over the bus].

    Args:
        numels: elements of each range, multiples of 256.
        bus: bus between device and host.
        device: device on which gradients are reduced.
        travels: dtype in which they are.
        accumulates: a step adds up micro steps as a rule.
        factors: factors that reduced gradients of the ranges are multiplied by; here they only decide `widens`.
        pool: pool that makes the host memory.
        memory: arenas in which the host buffers, and the sums on the device, are reserved.
        ahead: sums leave the device as soon as they are final, into buffers of their own.

    Attributes:
        device: device on which gradients are reduced.
        travels: dtype of the reduced gradients.
        accumulates: whether a step adds up several micro steps as a rule.
        ahead: whether sums leave the device as soon as they are final, into buffers of their own.
        widens: gradients that have left are multiplied in fp32 on the host, before everything else.
        is_last: the micro step that reduces gradients now is the last of its step.
        listener: listener that is told of gradients that are final or about to change; None for none.
    """

    def __init__(
        self,
        numels: Sequence[int],
        *,
        bus: Bus,
        device: torch.device,
        travels: torch.dtype,
        accumulates: bool,
        factors: Sequence[float],
        pool: HostPool,
        memory: Arenas,
        ahead: bool = False,
    ) -> None:
        self.is_last = False
        self.listener: GradientListener | None = None
        self._numels = list(numels)
        self._largest = max(numels, default=0)
        self._bus = bus
        self.device = device
        self.travels = travels
        self.accumulates = accumulates
        self.ahead = ahead
        self.widens = not (accumulates or travels == torch.float32 or all(map(is_power_of_two, factors)))
        self._sent: dict[int, _Sent] = {}
        self._norms: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._host: list[Tensor] = []
        self._ring: list[Tensor] = []
        self._wide: Tensor | None = None
        self._order: list[int] = list(range(len(numels)))
        self._turns: dict[int, int] = {}
        self._leaving: dict[int, Event] = {}
        self._final: Event | None = None

        def sums(numel: int) -> Tensor:
            return fresh_zeros(numel, dtype=torch.float32, device=device)

        def wide(numel: int) -> Tensor:
            return pool.zeros(numel, dtype=torch.float32)

        if accumulates:
            self._sum_arena: Arena = memory.reserve("gradient sums", room_for(numels), sums, leaves=True)
            self._kept = [self._sum_arena.take(numel) for numel in numels]
            if ahead:
                arena = memory.reserve("host gradients", room_for(numels), wide, tier="host")
                self._host = [arena.take(numel) for numel in numels]
                return
            room = room_for([self._largest] * RING)
            self._ring_arena: Arena = memory.reserve("gradient ring", room, wide, tier="host")
            self._fill_ring()
            return
        self._kept = []
        self._sum_arena = memory.growing("gradient sums", sums, leaves=True)
        self._ring_arena = memory.growing("gradient ring", wide, tier="host")
        arena = memory.reserve(
            "host gradients", room_for(numels), lambda numel: pool.zeros(numel, dtype=travels), tier="host"
        )
        self._host = [arena.take(numel) for numel in numels]
        if self.widens:
            room = room_for([self._largest])
            self._wide = memory.reserve("wide gradients", room, wide, tier="host").take(self._largest)

    # What zero asks for: `GradSums` -----------------------------------------------------------------------------------

    def take(self, index: int, reduced_N: Tensor, factor: float, *, first: bool) -> Pending | None:
        """See `GradSums`."""
        if first:
            self._say_it_changes(index)
        if first and not self.accumulates:
            copying = self._send(index, reduced_N, factor)
            self._say_it_arrives(index)
            return copying
        sum_N = self._begin_sum(index) if first else self.edit(index)
        (set_scaled if first else add_scaled)(sum_N, reduced_N, factor)
        if self.is_last and self.ahead and self.accumulates:
            self.start(index)
            self._say_it_arrives(index)
        return None

    def clear(self) -> None:
        """See `GradSums`."""
        for index, numel in enumerate(self._numels):
            self._say_it_changes(index)
            if self.accumulates:
                self._begin_sum(index).zero_()
            else:
                self._wait_until_there(index)
                self._drop_sum(index)
                self._host[index].zero_()
                self._sent[index] = _Sent(None, 1.0)
                self._norms[index] = block_norms(torch.zeros(numel, device=self.device))

    def norms(self) -> list[Tensor]:
        """See `GradSums`."""
        return [
            self._norms[index] if index in self._sent else block_norms(self._sums[index])
            for index in range(len(self._numels))
        ]

    def read(self, index: int) -> Tensor:
        """See `GradSums`: a copy, where the gradient has left the device."""
        sent = self._sent.get(index)
        if sent is None:
            return self._sums[index]
        self._wait_until_there(index)
        values_N = torch.empty(self._numels[index], dtype=torch.float32)
        set_scaled(values_N, self._host[index], sent.factor)
        return values_N

    def edit(self, index: int) -> Tensor:
        """See `GradSums`: a gradient that has left the device comes back."""
        self._say_it_changes(index)
        sent = self._sent.pop(index, None)
        if sent is None:
            return self._sums[index]
        here_N = torch.empty(self._numels[index], dtype=self.travels, device=self.device)
        after = [] if sent.event is None else [sent.event]
        self._bus.wait(self._bus.start_back(self._host[index], here_N, kind="gradients", after=after))
        sum_N = self._begin_sum(index)
        set_scaled(sum_N, here_N, sent.factor)
        return sum_N

    # What the step on the host asks for -------------------------------------------------------------------------------

    def prepare(self, final: Event) -> None:
        """A step begins: makes the room it needs; not from the thread that steps.

        Args:
            final: the point of the compute stream at which sums are what will be stepped on.
        """
        self._final = final
        if self._sums and not self._ring and not self._has_places_of_sums:
            self._fill_ring()
        of_sums = [index for index in self._order if index in self._sums]
        self._turns = {index: turn % RING for turn, index in enumerate(of_sums)}

    def start(self, index: int) -> None:
        """Lets a range's sum leave the device, if it has not; at most `RING` of them may be on the host at once."""
        if index in self._sums and index not in self._leaving:
            place_N = self._place_of_sum(index)
            self._leaving[index] = self._bus.start_out(self._sums[index], place_N, kind="gradients", mark=self._final)

    def fetch(self, index: int) -> HostGradient:
        """Returns a range's gradient when it is in host memory."""
        if index in self._sums:
            self.start(index)
            self._leaving[index].synchronize()
            return HostGradient(self._place_of_sum(index), 1.0)
        self._wait_until_there(index)
        sent, values_N = self._sent[index], self._host[index]
        if is_power_of_two(sent.factor):
            return HostGradient(values_N, sent.factor)
        assert self._wide is not None, "reserved where the factor of every gradient is no power of two"
        wide_N = self._wide.narrow(0, 0, self._numels[index])
        set_scaled(wide_N, values_N, sent.factor)
        return HostGradient(wide_N, 1.0)

    def own_place(self, index: int) -> Tensor | None:
        """Returns the buffer that a range's gradient came in, for what comes out of its step; None where it has none.

        A gradient there must have been read, block by block, before its place is written to.
        """
        return self._host[index] if index in self._sent else None

    def place_dtype(self, index: int) -> torch.dtype | None:
        """Returns the dtype of `own_place` as it will be in the next step; None where there will be none."""
        return None if self.accumulates or index in self._sums else self.travels

    def buffers(self) -> list[Tensor]:
        """Returns what is held, on the device and on the host."""
        wide = [] if self._wide is None else [self._wide]
        return [*self._host, *self._ring, *wide, *(self._kept or self._sums.values())]

    def follow(self, order: Sequence[int]) -> None:
        """Says in which order ranges are stepped."""
        self._order = list(order)

    def forget(self) -> None:
        """The step is over; not from the thread that stepped."""
        self._sent.clear()
        self._leaving.clear()
        self._final = None
        if not self.accumulates:
            for index in list(self._sums):
                self._drop_sum(index)

    def _send(self, index: int, reduced_N: Tensor, factor: float) -> Pending:
        if reduced_N.dtype == torch.float32:
            if factor != 1:
                reduced_N.mul_(factor)
            self._norms[index], factor = block_norms(reduced_N), 1.0
        else:
            self._norms[index] = _norms_of_scaled(reduced_N, factor)
        self._drop_sum(index)  # of a step that was left out
        event = self._bus.start_out(reduced_N, self._host[index], kind="gradients")
        self._sent[index] = _Sent(event, factor)
        return _Copying(self._bus, event)

    @property
    def _has_places_of_sums(self) -> bool:
        return self.ahead and self.accumulates

    def _place_of_sum(self, index: int) -> Tensor:
        if self._has_places_of_sums:
            return self._host[index]
        return self._ring[self._turns[index]].narrow(0, 0, self._numels[index])

    def _say_it_arrives(self, index: int) -> None:
        if self.is_last and self.listener is not None:
            self.listener.arrives(index)

    def _say_it_changes(self, index: int) -> None:
        """A gradient is about to be written, on the device or on the host: nobody steps on it ahead."""
        if self.listener is not None:
            self.listener.changes(index)
        left = self._leaving.pop(index, None)
        if left is not None:
            self._bus.wait(left)  # reads the sum

    def _begin_sum(self, index: int) -> Tensor:
        if self._kept:
            self._sums[index] = self._kept[index]
        elif index not in self._sums:
            self._sums[index] = self._sum_arena.take(self._numels[index])
        return self._sums[index]

    def _drop_sum(self, index: int) -> None:
        sum_N = self._sums.pop(index, None)
        if sum_N is not None:
            self._sum_arena.give_back(sum_N)

    def _fill_ring(self) -> None:
        self._ring = [self._ring_arena.take(self._largest) for _ in range(RING)]

    def _wait_until_there(self, index: int) -> None:
        sent = self._sent.get(index)
        if sent is not None and sent.event is not None:
            sent.event.synchronize()


def is_power_of_two(factor: float) -> bool:
    """Whether a multiplication by `factor` changes no bit of a number's mantissa."""
    return math.frexp(factor)[0] == 0.5


def _norms_of_scaled(grads_N: Tensor, factor: float) -> Tensor:
    """Returns `block_norms` of `factor * grads_N` in fp32, without so much memory at once."""
    found: list[Tensor] = []
    for piece in grads_N.split(_NORM_NUMEL):
        wide = torch.empty(piece.numel(), dtype=torch.float32, device=piece.device)
        set_scaled(wide, piece, factor)
        found.append(block_norms(wide))
    return torch.cat(found)
