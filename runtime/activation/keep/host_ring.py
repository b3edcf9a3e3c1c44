"""Keeps tensors in a ring of page-locked host memory, and brings them back before backward wants them.

[Note: the ring]
Forward puts tensors out one after another; backward takes them in the opposite order. Slots come from memory that grows
in the first step, after which nothing is allocated or page-locked any more (host_room.py). The last `IN_FLIGHT` tensors
put out stay on the device until their copy is done, and if backward begins now, they need not come back at all. When a
tensor is taken, the copy of the one put before it starts, and has that block's recomputation and backward to hide
behind. What a copy out reads, copy_source.py decides.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...memory.bus import Bus, Event
from ...memory.host_pool import HostPool
from ...memory.streams import current_stream, on_stream, use_here
from .copy_source import CopySource, CopySources
from .flat import Form, as_line
from .host_room import HostRoom
from .keeper import Ticket

#: Tensors that may be on the device because their copy to the host is not known to be done.
IN_FLIGHT = 2


@dataclass(slots=True, eq=False)
class _Leaving:
    """A tensor on its way out.

    Attributes:
        serial: its number.
        source: source that the copy to the host reads.
        event: the end of the copy.
        stream: the one it was put on.
    """

    serial: int
    source: CopySource
    event: Event
    stream: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """A tensor on its way in: its line, the end of the copy, and the stream of its memory."""

    line_N: Tensor
    event: Event
    stream: Any


class HostRing:
    """A keeper of one device, see [Note: the ring] and keeper.[Note: keepers].

    Args:
        device: device that the tensors come from.
        bus: bus between the ring's device and the host, used by this ring alone.
        pool: pool that makes the host memory.
    """

    def __init__(self, device: torch.device, bus: Bus, *, pool: HostPool) -> None:
        self._device = device
        self._bus = bus
        self._room = HostRoom(pool)
        self._sources = CopySources(instant=bus.is_instant)
        self._serial = 0
        self._out: dict[int, weakref.ref[_Slot]] = {}
        self._leaving: deque[_Leaving] = deque()
        self._arriving_bytes = 0
        # The memory that copies read and write lives until they have ended.
        ending = weakref.finalize(self, _end, os.getpid(), bus, self._room)
        ending.atexit = False  # a process that ends waits for no device

    @property
    def device_bytes(self) -> int:
        """See `Keeper`: on the way out and on the way in."""
        lines = [leaving.source.line_N for leaving in self._leaving]
        return sum(line_N.nbytes for line_N in lines if line_N is not None) + self._arriving_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the ring."""
        return self._room.nbytes

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`."""
        assert tensor.device == self._device, f"{tensor.device} is not the ring's {self._device}"
        if not self._out:
            self._sources.begin_round()
            self._room.begin_round(self._bus.finish)
        self._look()
        line_N, form = as_line(tensor)
        source = self._sources.source_of(tensor, line_N, form, label=label)
        assert source.line_N is not None, "it is leaving"
        memory = self._room.take(form.nbytes)
        slot_N = memory.view(form.dtype)
        event = self._bus.start_out(source.line_N, slot_N, kind="activations")
        leaving = _Leaving(self._serial, source, event, current_stream(self._device))
        self._serial += 1
        self._leaving.append(leaving)
        while len(self._leaving) > IN_FLIGHT:
            self._has_left(self._leaving.popleft())
        ticket = _Slot(self, leaving, memory, slot_N, form)
        self._out[leaving.serial] = weakref.ref(ticket)
        return ticket

    def check(self, leaving: _Leaving) -> None:
        """Returns if a tensor is in the ring with the values that were put.

        Raises:
            ModelError: it was changed while it was copied.
        """
        self._look()
        leaving.source.check()

    def still_here(self, leaving: _Leaving) -> Tensor | None:
        """Returns the line of a tensor that has not left, for its taker."""
        line_N = leaving.source.still_here()
        if line_N is not None and leaving.source.is_own:
            self._bus.wait(leaving.event)
        return line_N

    def start_back(self, leaving: _Leaving, slot_N: Tensor) -> _Arriving:
        """Starts to bring a slot back."""
        if (
            leaving.source.line_N is not None
        ):  # it has changed since, so what was put must be there before it comes back
            self._bus.wait(leaving.event)
        self._arriving_bytes += slot_N.nbytes
        arriving_N = torch.empty_like(slot_N, device=self._device)
        event = self._bus.start_back(slot_N, arriving_N, kind="activations")
        return _Arriving(arriving_N, event, current_stream(self._device))

    def arrived(self, arriving: _Arriving) -> None:
        """What was on its way in is the taker's now."""
        self._arriving_bytes -= arriving.line_N.nbytes
        self._bus.wait(arriving.event)

    def prefetch_before(self, serial: int) -> None:
        """Starts to bring back what was put before."""
        before = next((s for s in range(serial - 1, max(-1, serial - 1 - len(self._out)), -1) if s in self._out), None)
        ticket = None if before is None else self._out[before]()
        if ticket is not None:
            ticket.prefetch()

    def forget(self, leaving: _Leaving, memory: Tensor) -> None:
        """A ticket is gone: its slot is free for what is put later, which is copied after whatever it waits for."""
        del self._out[leaving.serial]
        if leaving.source.line_N is not None:
            self._leaving.remove(leaving)
            self._has_left(leaving)
        self._room.give_back(memory)

    def _look(self) -> None:
        for leaving in self._leaving:
            leaving.source.look(leaving.event)

    def _has_left(self, leaving: _Leaving) -> None:
        self._bus.wait(leaving.event)
        if leaving.stream != current_stream(self._device):
            with on_stream(leaving.stream):  # whose allocator gets the memory of what was copied
                self._bus.wait(leaving.event)
        leaving.source.end(leaving.event)


class _Slot:
    """A tensor in the ring."""

    def __init__(self, ring: HostRing, leaving: _Leaving, memory: Tensor, slot_N: Tensor, form: Form) -> None:
        self._ring = ring
        self._leaving = leaving
        self._memory = memory
        self._slot_N = slot_N
        self._form = form
        self._arriving: _Arriving | None = None

    def __del__(self) -> None:
        if self._arriving is not None:  # a backward that ended early has not taken it
            # Who drops a graph may be on another stream than the one that this memory is free for then.
            self._arriving.event.synchronize()
            self._ring.arrived(self._arriving)
        self._ring.forget(self._leaving, self._memory)

    def take(self) -> Tensor:
        self._ring.check(self._leaving)
        line_N, stream = self._ring.still_here(self._leaving), self._leaving.stream
        if line_N is None:
            arriving = self._arriving or self._ring.start_back(self._leaving, self._slot_N)
            self._arriving = None
            self._ring.arrived(arriving)
            line_N, stream = arriving.line_N, arriving.stream
        use_here(line_N, stream)
        self._ring.prefetch_before(self._leaving.serial)
        return self._form.of(line_N)

    def prefetch(self) -> None:
        """Starts to come back, unless that has happened or it is there."""
        if self._arriving is None and self._leaving.source.still_here() is None:
            self._arriving = self._ring.start_back(self._leaving, self._slot_N)


def _end(process: int, bus: Bus, room: HostRoom) -> None:
    """Ends the copies under way; the memory, an argument of this call, goes with its end."""
    if os.getpid() == process:  # a fork has no copies under way
        bus.finish()
