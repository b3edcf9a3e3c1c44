"""Keeps tensors in a file, and a few of them in host memory on their way there and back.

[Note: the way to the disk and back]
Forward puts tensors out one after another: each is copied into a buffer of host memory, and from there to the file as
soon as the copy is known to be done, which is when `IN_FLIGHT` more have been put. A buffer keeps its values until
another tensor needs it, so the last ones are still in memory when backward begins. Backward takes them in the opposite
order: with each that is taken, reads of those before it begin, into every buffer that is free, and the next one is
copied to the device if its read has ended. So a read has the recomputation and backward of several blocks to hide
behind, and host memory holds `buffers` tensors, whatever the depth of the model.

Whoever waits for a read or a write that failed gets the disk's error, with the block whose values they are. A write
that fails is not waited for while its values are still in memory.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsrun.config.rules.activation import FEWEST_BUFFERS
from dsrun.direct_io.counts import IoCounts
from dsrun.direct_io.extent_file import Extent, ExtentFile
from dsrun.direct_io.pending import PendingIo
from dsrun.direct_io.settings import round_up
from dsrun.errors import OffloadError

from ...memory.bus import Bus, Event
from ...memory.streams import current_stream, use_here
from .copy_source import CopySource, CopySources
from .disk_room import DiskRoom
from .flat import Form, as_line
from .host_ring import IN_FLIGHT
from .keeper import AsItIs, Ticket


@dataclass(slots=True, eq=False)
class _Buffer:
    """Host memory for one tensor.

    Attributes:
        memory: bytes, aligned as direct calls want them.
        event: the last copy between it and the device.
        under_way: reads and writes in progress of a tensor that no longer uses the buffer.
    """

    memory: Tensor
    event: Event | None = None
    under_way: list[PendingIo] = field(default_factory=list[PendingIo])

    def bytes_of(self, nbytes: int) -> memoryview:
        """Returns its first bytes; who has them keeps the buffer."""
        return memoryview((ctypes.c_char * nbytes).from_address(self.memory.data_ptr())).cast("B")

    def settle(self) -> None:
        """Returns when neither the disk nor a copy is at work on it."""
        for pending in self.under_way:
            with suppress(OffloadError):  # whoever wants the values meets it; here the memory is wanted
                pending.wait()
        self.under_way.clear()
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class DiskRing:
    """A keeper of one device, see [Note: the way to the disk and back] and keeper.[Note: keepers].

    Args:
        device: device that the tensors come from.
        bus: bus between the ring's device and the host, used by this ring alone.
        open_file: function that makes the file, called for the first tensor.
        buffers: tensors that host memory has room for, at least `FEWEST_BUFFERS`.
        memory: function that makes a given number of bytes of host memory that begin at a page.
    """

    def __init__(
        self,
        device: torch.device,
        bus: Bus,
        *,
        open_file: Callable[[], ExtentFile],
        buffers: int,
        memory: Callable[[int], Tensor],
    ) -> None:
        assert buffers >= FEWEST_BUFFERS, f"{buffers} buffers: reads could not run ahead"
        self._device = device
        self._bus = bus
        self._memory = memory
        self._limit = buffers
        self._room = DiskRoom(open_file)
        self._sources = CopySources(instant=bus.is_instant)
        self._buffers: list[_Buffer] = []
        self._idle: list[_Buffer] = []
        self._serial = 0
        self._out: dict[int, weakref.ref[_Away]] = {}
        self._leaving: deque[int] = deque()
        self._arriving_bytes = 0
        self._small = AsItIs()
        # The memory that copies and the disk read and write lives until they have ended.
        ending = weakref.finalize(self, _end, os.getpid(), bus, self._room, self._buffers)
        ending.atexit = False  # a process that ends waits for no disk and no device

    @property
    def device_bytes(self) -> int:
        """See `Keeper`: on the way out and on the way in."""
        tickets = [self._out[serial]() for serial in self._leaving]
        return sum(ticket.form.nbytes for ticket in tickets if ticket is not None) + self._arriving_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return self._room.nbytes

    def counts(self) -> IoCounts:
        """Returns what was moved to and from the disk so far."""
        return self._room.counts()

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`.

        Raises:
            OffloadError: a block's values cannot be written.
        """
        assert tensor.device == self._device, f"{tensor.device} is not the ring's {self._device}"
        if not tensor.nbytes:
            return self._small.put(tensor, label=label)
        if not self._out:
            self._sources.begin_round()
            self._room.begin()
        self._look()
        line_N, form = as_line(tensor)
        # What was put first is wanted last.
        buffer = self._buffer(form.nbytes, lambda away: away.serial)
        source = self._sources.source_of(tensor, line_N, form, label=label)
        assert source.line_N is not None, "it is leaving"
        slot_N = buffer.memory[: form.nbytes].view(form.dtype)
        buffer.event = self._bus.start_out(source.line_N, slot_N, kind="activations")
        away = _Away(self, self._serial, label, form, buffer, source, current_stream(self._device))
        self._out[self._serial] = weakref.ref(away)
        self._leaving.append(self._serial)
        self._serial += 1
        while len(self._leaving) > IN_FLIGHT:
            first = self._out[self._leaving[0]]()
            assert first is not None, "a tensor that is gone leaves the list"
            self._write(first)
        return away

    def take(self, away: _Away) -> Tensor:
        """Returns a tensor's line, on the device.

        Raises:
            OffloadError: it does not come back.
            ModelError: it was changed while it was copied.
        """
        self._look()
        away.source.check()
        line_N, stream = away.source.still_here(), away.put_on
        if line_N is None:
            if away.arriving is None:
                self._start_back(away)
            assert away.arriving is not None, "it has begun to come"
            line_N, event, stream = away.arriving
            away.arriving = None
            self._arriving_bytes -= line_N.nbytes
            self._bus.wait(event)
        elif away.source.is_own:
            assert away.buffer is not None, "it has not left"
            assert away.buffer.event is not None, "it was copied out"
            self._bus.wait(away.buffer.event)
        use_here(line_N, stream)
        self._prefetch_before(away.serial)
        return line_N

    def forget(self, away: _Away) -> None:
        """A tensor is wanted no more."""
        del self._out[away.serial]
        if away.arriving is not None:  # a backward that ended early has not taken it
            # Who drops a graph may be on another stream than the one that this memory is free for then.
            away.arriving[1].synchronize()
            self._arriving_bytes -= away.form.nbytes
            self._bus.wait(away.arriving[1])
        if away.is_leaving:
            self._leaving.remove(away.serial)
            assert away.buffer is not None
            assert away.buffer.event is not None
            self._bus.wait(away.buffer.event)
            away.source.end(away.buffer.event)
        under_way = [pending for pending in (away.writing, away.reading) if pending is not None]
        if away.extent is not None:
            self._room.give_back(away.extent, under_way)
        if away.buffer is not None:
            away.buffer.under_way += under_way
            self._idle.append(away.buffer)

    # ------------------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for serial in self._leaving:
            away = self._out[serial]()
            if away is not None and away.buffer is not None and away.buffer.event is not None:
                away.source.look(away.buffer.event)

    def _write(self, away: _Away) -> None:
        """Begins to write what is in a buffer; it is on the device no more."""
        buffer = away.buffer
        assert buffer is not None
        assert buffer.event is not None, "it was copied out"
        buffer.event.synchronize()  # the disk's threads know no streams
        away.source.end(buffer.event)
        self._leaving.remove(away.serial)
        with _errors_of(away.label):
            away.extent = self._room.take(away.form.nbytes)
            away.writing = self._room.file.write(away.extent, buffer.bytes_of(away.extent.nbytes))

    def _start_back(self, away: _Away) -> None:
        """Starts to copy a tensor to the device, and waits for the disk if it must."""
        if away.buffer is None:
            # What is wanted next comes last.
            self._start_read(away, self._buffer(away.form.nbytes, lambda other: -abs(other.serial - away.serial)))
        buffer = away.buffer
        assert buffer is not None, "it has just got one"
        if away.reading is not None:
            with _errors_of(away.label):
                away.reading.wait()
            away.reading = None
        if away.is_leaving and buffer.event is not None:
            self._bus.wait(buffer.event)  # it has changed since, so what was put must be there before it comes back
        slot_N = buffer.memory[: away.form.nbytes].view(away.form.dtype)
        arriving_N = torch.empty_like(slot_N, device=self._device)
        self._arriving_bytes += arriving_N.nbytes
        buffer.event = self._bus.start_back(slot_N, arriving_N, kind="activations")
        away.arriving = arriving_N, buffer.event, current_stream(self._device)

    def _start_read(self, away: _Away, buffer: _Buffer) -> None:
        assert away.extent is not None, "without a buffer it is on the disk"
        away.buffer = buffer
        with _errors_of(away.label):
            away.reading = self._room.file.read(away.extent, buffer.bytes_of(away.extent.nbytes))

    def _prefetch_before(self, serial: int) -> None:
        """Starts reads of what was put before, and the copy of the next one."""
        before = [number for number in self._out if number < serial]
        for position, number in enumerate(reversed(before)):
            away = self._out[number]()
            if away is None:
                continue
            if away.buffer is None:
                buffer = self._spare_buffer(away.form.nbytes, above=serial)
                if buffer is None:
                    return
                self._start_read(away, buffer)
            is_here = away.reading is None or away.reading.is_done
            if not position and is_here and not away.is_leaving and away.arriving is None:
                self._start_back(away)

    def _buffer(self, nbytes: int, order: Callable[[_Away], int]) -> _Buffer:
        """Returns a buffer; where all are taken, that of the first tensor by `order`, once it is on the disk."""
        if self._idle or len(self._buffers) < self._limit:
            return self._ready(nbytes)
        self._vacate(min(self._in_buffers(), key=order))
        return self._ready(nbytes)

    def _spare_buffer(self, nbytes: int, *, above: int) -> _Buffer | None:
        """Returns a buffer that nobody needs soon: what was put behind `above` has been taken."""
        if not self._idle and len(self._buffers) >= self._limit:
            taken = [away for away in self._in_buffers() if away.serial > above and away.writing is not None]
            if not taken:
                return None
            self._vacate(taken[-1])
        return self._ready(nbytes)

    def _in_buffers(self) -> list[_Away]:
        tickets = [ticket() for ticket in self._out.values()]
        return [away for away in tickets if away is not None and away.buffer is not None]

    def _vacate(self, away: _Away) -> None:
        """Takes the buffer of a tensor, after its values are on the disk."""
        if away.is_leaving:
            self._write(away)
        assert away.buffer is not None
        assert away.writing is not None
        with _errors_of(away.label):
            away.writing.wait()
        buffer, away.buffer = away.buffer, None
        if away.reading is not None:
            buffer.under_way.append(away.reading)
            away.reading = None
        self._idle.append(buffer)

    def _ready(self, nbytes: int) -> _Buffer:
        """Returns a buffer that nobody has, of so many bytes or more."""
        size = round_up(nbytes)
        if not self._idle:
            buffer = _Buffer(self._memory(size))
            self._buffers.append(buffer)
            return buffer
        buffer = self._idle.pop()
        buffer.settle()
        if buffer.memory.nbytes < size:
            buffer.memory = self._memory(size)
        return buffer


class _Away:
    """A tensor in a ring.

    Attributes:
        serial: its number.
        label: the block that wants it again.
        form: form of the tensor (shape, strides, dtype), which its flat line lacks.
        buffer: host memory that the tensor is in or is being brought to; None while it is on the disk alone.
        source: source that the copy to the host reads; it holds the tensor until that is known to have left the device.
        extent: its place on the disk.
        writing: write to the disk, in progress or done; None before it begins.
        reading: read from the disk, in progress; None for none.
        arriving: its line on the device, what to wait for before it is read, and the stream of its memory.
        put_on: the stream it was put on.
    """

    __slots__ = (
        "__weakref__",
        "_ring",
        "arriving",
        "buffer",
        "extent",
        "form",
        "label",
        "put_on",
        "reading",
        "serial",
        "source",
        "writing",
    )

    def __init__(
        self, ring: DiskRing, serial: int, label: str, form: Form, buffer: _Buffer, source: CopySource, put_on: Any
    ) -> None:
        self._ring = ring
        self.serial = serial
        self.label = label
        self.form = form
        self.buffer: _Buffer | None = buffer
        self.source = source
        self.extent: Extent | None = None
        self.writing: PendingIo | None = None
        self.reading: PendingIo | None = None
        self.arriving: tuple[Tensor, Event, Any] | None = None
        self.put_on = put_on

    @property
    def is_leaving(self) -> bool:
        """Whether its copy to host memory is not known to be done."""
        return self.source.line_N is not None

    def __del__(self) -> None:
        self._ring.forget(self)

    def take(self) -> Tensor:
        return self.form.of(self._ring.take(self))


@contextmanager
def _errors_of(block: str) -> Generator[None]:
    """Inside, errors of the disk get the name of the block whose values are there."""
    try:
        yield
    except OffloadError as error:
        # The file keeps the error; with its frames it would keep all that is in the ring.
        plain = error.with_traceback(None)
        raise OffloadError(f"activations of `{block}`: {error}", hint=error.hint) from plain


def _end(process: int, bus: Bus, room: DiskRoom, buffers: list[_Buffer]) -> None:
    """Ends what is under way on the bus and the disk; the buffers, arguments of this call, go with its end."""
    if os.getpid() == process:  # a fork has nothing under way, and none of the threads
        bus.finish()
        room.close()
