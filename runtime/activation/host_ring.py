"""Keeps tensors in a ring of pinned host memory, and brings them back before backward wants them.

[Note: the ring]
Forward puts tensors out one after another; backward takes them in the opposite order. Slots come from a growing arena,
so after the first step nothing is allocated or pinned any more. The last `IN_FLIGHT` tensors put out stay on the
device until their copy is done, and if backward begins now, they need not come back at all. When a tensor is taken, the
copy of the one put before it starts, and has that block's recomputation and backward to hide behind.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory.arena import Arena
from ..memory.bus import Bus, Event
from .flat import Form, as_line
from .keeping import Ticket

#: Tensors that may be on the device because their copy to the host is not known to be done.
IN_FLIGHT = 2


@dataclass(slots=True, eq=False)
class _Leaving:
    """A tensor on its way out: its elements in a line, their version, and the event of the copy."""

    serial: int
    line_N: Tensor
    version: int
    event: Event


class HostRing:
    """A keeper of one device, see [Note: the ring] and keeping.[Note: keepers].

    Args:
        device: where the tensors come from; elsewhere they are kept as they are told.
        bus: between that device and the host.
    """

    def __init__(self, device: torch.device, bus: Bus) -> None:
        self._device = device
        self._bus = bus
        pinned = device.type != "cpu"
        self._arena = Arena(
            "activations in host memory",
            lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned),
            grows=True,
        )
        self._serial = 0
        self._out: dict[int, weakref.ref[_Slot]] = {}
        self._leaving: deque[_Leaving] = deque()
        self._arriving_bytes = 0

    @property
    def device_bytes(self) -> int:
        """See `Keeper`: on the way out and on the way in."""
        return sum(leaving.line_N.nbytes for leaving in self._leaving) + self._arriving_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the ring."""
        return self._arena.use().reserved_bytes

    def put(self, tensor: Tensor, *, of: str = "") -> Ticket:
        """See `Keeper`."""
        assert tensor.device == self._device, f"{tensor.device} is not the ring's {self._device}"
        if not self._out and self._arena.use().reserved_bytes:
            self._bus.finish()
            self._arena.compact()  # after the first step: one block of many
        line_N, form = as_line(tensor)
        memory = self._arena.take(form.nbytes)
        slot_N = memory.view(form.dtype)
        event = self._bus.start_out(line_N, slot_N, kind="activations")
        serial = self._serial
        self._serial += 1
        self._leaving.append(_Leaving(serial, line_N, line_N._version, event))
        while len(self._leaving) > IN_FLIGHT:
            self._bus.wait(self._leaving.popleft().event)
        ticket = _Slot(self, serial, memory, slot_N, form)
        self._out[serial] = weakref.ref(ticket)
        return ticket

    def still_here(self, serial: int) -> Tensor | None:
        """Returns the line of a tensor that has not left the device, if it is what it was."""
        for leaving in self._leaving:
            if leaving.serial == serial and leaving.line_N._version == leaving.version:
                return leaving.line_N
        return None

    def start_back(self, serial: int, slot_N: Tensor) -> tuple[Tensor, Event]:
        """Starts to bring a slot back: the new tensor, and what to wait for before it is read."""
        for leaving in self._leaving:
            if leaving.serial == serial:  # it has changed since, so what was put must be there before it comes back
                self._bus.wait(leaving.event)
        self._arriving_bytes += slot_N.nbytes
        arriving_N = torch.empty_like(slot_N, device=self._device)
        return arriving_N, self._bus.start_back(slot_N, arriving_N, kind="activations")

    def arrived(self, line_N: Tensor, event: Event) -> None:
        """What was on its way in is the taker's now."""
        self._arriving_bytes -= line_N.nbytes
        self._bus.wait(event)

    def prefetch_before(self, serial: int) -> None:
        """Starts to bring back what was put before."""
        before = next((s for s in range(serial - 1, max(-1, serial - 1 - len(self._out)), -1) if s in self._out), None)
        ticket = None if before is None else self._out[before]()
        if ticket is not None:
            ticket.prefetch()

    def forget(self, serial: int, memory: Tensor) -> None:
        """A ticket is gone: its slot is free for what is put later, which is copied after whatever it waits for."""
        del self._out[serial]
        for leaving in [leaving for leaving in self._leaving if leaving.serial == serial]:
            self._bus.wait(leaving.event)
            self._leaving.remove(leaving)
        self._arena.give_back(memory)


class _Slot:
    """A tensor in the ring."""

    def __init__(self, ring: HostRing, serial: int, memory: Tensor, slot_N: Tensor, form: Form) -> None:
        self._ring = ring
        self._serial = serial
        self._memory = memory
        self._slot_N = slot_N
        self._form = form
        self._arriving: tuple[Tensor, Event] | None = None

    def __del__(self) -> None:
        if self._arriving is not None:
            self._ring.arrived(*self._arriving)
        self._ring.forget(self._serial, self._memory)

    def take(self) -> Tensor:
        line_N = self._ring.still_here(self._serial)
        if line_N is None:
            line_N, event = self._arriving or self._ring.start_back(self._serial, self._slot_N)
            self._arriving = None
            self._ring.arrived(line_N, event)
        self._ring.prefetch_before(self._serial)
        return self._form.of(line_N)

    def prefetch(self) -> None:
        """Starts to come back, unless that has happened or it is there."""
        if self._arriving is None and self._ring.still_here(self._serial) is None:
            self._arriving = self._ring.start_back(self._serial, self._slot_N)
