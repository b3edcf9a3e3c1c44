"""Messages between CPU ranks of one host: the sender copies into memory that both see, and the receiver reads it there.

[Note: lines] Each rank has a first segment that all others map at the start. At its beginning stand a mark and some
words about the rank, and a *line* for each other rank and lane: a semaphore that counts the messages on it, and where
the first page of entries is. A page is a block with one entry a message, and at its end the place of the next page; so
a line has no length, and a send waits for nobody. Who has read a page frees it.

[Note: memory of a message] A message is one block: its lengths, the forms of its tensors, the header, the tensors. The
receiver's tensors lie in that block. Each of their storages keeps one `memoryview` of the block alive; when the last of
them goes, whoever keeps it and in whatever thread, the memoryview goes, and a weak reference to it frees the block. So
the block stays with the receiver for as long as any tensor, view or saved activation refers to it. A process that was
forked has copies of all these, which free nothing: the block is the parent's. The semaphore orders memory: the sender
writes into a block again only after all that the receiver did with it before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.errors import DsrunError

from ..collectives import Done, Pending, WaitObserver
from ..host_memory.collectives import exchange_over
from ..host_memory.segments import share_memory
from ..host_memory.semaphores import (
    SEMAPHORE_BYTES,
    looks_before_sleep,
    make_semaphore,
    raise_semaphore,
    try_semaphore,
    wait_for_semaphore,
)
from ..step_position import Where
from .blocks import HEAD_BYTES, Block, Blocks, OthersSegments, Segment
from .in_order import OrderedLinks, Take
from .links import Lane, Message
from .packing import Form, Packing, align, fill, packing_from, packing_of

#: Of the first segment, which others need not map later on; see [Note: sizes of blocks].
_FIRST_BYTES = 1 << 30
#: At the start of the first segment: the mark of a rank that has left, the length of its words, and the words.
_WORDS = struct.Struct("=BH")
_WORDS_BYTES = 512
#: A line: its semaphore, and the entry of its first page.
_LINE_BYTES = 2 * SEMAPHORE_BYTES
#: An entry: number, descriptor and bytes of a segment, and the offset of a block in it.
_ENTRY = struct.Struct("=iiqq")
_PAGE_ENTRIES = 128
_PAGE_BYTES = (_PAGE_ENTRIES + 1) * _ENTRY.size
#: Of a message, behind the head: bytes of the description of the tensors and of the header.
_LENGTHS = struct.Struct("=qq")
#: Between two looks at whether a peer that keeps us waiting still lives.
_NAP_S = 0.25
_CPU = torch.device("cpu")
_DONE = Done()
_LANES = list(Lane)


def _line_offset(to: int, lane: Lane) -> int:
    return _WORDS_BYTES + (to * len(_LANES) + _LANES.index(lane)) * _LINE_BYTES


def _entry_of(block: Block) -> bytes:
    return _ENTRY.pack(block.number, block.segment.fd, block.segment.nbytes, block.offset)


def _read_tensor(held: memoryview, form: Form) -> Tensor:
    """Returns a tensor that lies in memory, which its storage keeps."""
    if not form.numel:
        return torch.empty(form.shape, dtype=form.dtype)
    flat = torch.frombuffer(held, dtype=form.dtype, count=form.numel, offset=form.offset)
    return flat if len(form.shape) == 1 else flat.view(form.shape)


@dataclass(slots=True)
class _Outgoing:
    """A line as its sender has it.

    Attributes:
        count: semaphore of the messages on it.
        page: page that entries are written to.
        written: number of entries on that page.
    """

    count: ctypes.c_void_p
    page: Block
    written: int = 0


@dataclass(slots=True)
class _Arriving:
    """A line as its receiver has it.

    Attributes:
        count: semaphore of the messages on it.
        segment: segment of the page that is read.
        offset: first byte of that page.
        read: number of entries that were read on it.
    """

    count: ctypes.c_void_p
    segment: Segment
    offset: int
    read: int = 0


class MailboxPointToPoint(OrderedLinks):
    """See the module; every rank of the group must make one.

    Args:
        group: the axis; its ranks share a host, see `segments.find_hosts`. Used to set up, not to move data.
        observer: observer that is told of this rank's waits; None for no observer.
        timeout_s: longest wait for a message.
        where: the step this rank is in, for errors.

    Raises:
        OSError: no memory can be shared; on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        observer: WaitObserver | None = None,
        *,
        timeout_s: float,
        where: Where | None = None,
    ) -> None:
        super().__init__(group.rank(), dist.get_process_group_ranks(group), observer, where=where)
        exchange = exchange_over(group)
        processes = [process for (process,) in exchange([os.getpid()])]
        memory = share_memory(_FIRST_BYTES, exchange)
        self._timeout_s = timeout_s
        self._looks = looks_before_sleep(self.size)
        self._process = os.getpid()
        self._words = [memoryview(each)[:_WORDS_BYTES] for each in memory]
        self._blocks = Blocks(memory[self.rank], used_bytes=_line_offset(self.size, _LANES[0]))
        self._others = {
            rank: OthersSegments(each, process=processes[rank]) for rank, each in enumerate(memory) if rank != self.rank
        }
        self._alive = {rank: os.pidfd_open(processes[rank]) for rank in self._others}
        #: Weak references to the memory of messages, until it is free.
        self._held: dict[int, weakref.ref[memoryview]] = {}
        self._outgoing = {
            (to, lane): self._open_line(memory[self.rank], to, lane) for to in self._others for lane in Lane
        }
        # Nobody may read a line before all have made theirs.
        exchange([1])
        self._arriving = {(rank, lane): self._find_line(rank, lane) for rank in self._others for lane in Lane}

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's memory that messages have taken so far, free or not."""
        return self._blocks.nbytes

    def close(self) -> None:
        """See `PointToPoint`; tells the others, and lets go of the memory, which goes with its last tensor."""
        if not self._alive and not self._outgoing:
            return
        if self._words:
            self._words[self.rank][0] = 1
        for fd in self._alive.values():
            os.close(fd)
        for others in self._others.values():
            others.close()
        self._blocks.close()
        self._alive, self._others, self._words = {}, {}, []
        self._outgoing, self._arriving = {}, {}

    def _send(self, tensors: Sequence[Tensor], to: int, lane: Lane, header: bytes, label: str) -> Pending:
        packing = packing_of(tensors, device_type="cpu", label=label)
        line = self._outgoing[to, lane]
        try:
            block = self._write(tensors, packing, header)
            if line.written == _PAGE_ENTRIES:
                page = self._blocks.take(_PAGE_BYTES)
                self._enter(line, page)
                line.page, line.written = page, 0
        except OSError as error:
            raise DsrunError(
                f"rank {self._ranks[self.rank]} has no memory to share for a message{f' of {label}' if label else ''} "
                f"to rank {self._ranks[to]} ({packing.nbytes} bytes){self._where}: {error}",
                hint="give the job more memory or open files, or fewer micro batches in flight",
            ) from error
        self._enter(line, block)
        line.written += 1
        raise_semaphore(line.count)
        return _DONE

    def _write(self, tensors: Sequence[Tensor], packing: Packing, header: bytes) -> Block:
        forms, text_at = packing.text, HEAD_BYTES + _LENGTHS.size
        header_at = text_at + len(forms)
        tensors_at = align(header_at + len(header))
        block = self._blocks.take(tensors_at - HEAD_BYTES + packing.nbytes)
        view, start = block.segment.view, block.offset
        _LENGTHS.pack_into(view, start + HEAD_BYTES, len(forms), len(header))
        view[start + text_at : start + header_at] = forms
        view[start + header_at : start + header_at + len(header)] = header
        if tensors:
            fill(block.places_of(packing, start=start + tensors_at), tensors)
        return block

    @staticmethod
    def _enter(line: _Outgoing, block: Block) -> None:
        """Writes where a block is behind what stands on the line's page."""
        at = line.page.offset + HEAD_BYTES + line.written * _ENTRY.size
        line.page.segment.view[at : at + _ENTRY.size] = _entry_of(block)

    def _ask(self, source: int, lane: Lane, label: str) -> Take:
        def take() -> Message:
            line = self._arriving[source, lane]
            if not try_semaphore(line.count):
                self._wait_for(line, source, lane, label)
            try:
                return self._read(line, source)
            except OSError as error:
                reason = self._gone(source) or f"has closed its memory ({error})"
                raise self._missing(source, lane, label, waited_s=0.0, reason=reason, last="") from error

        return take

    def _read(self, line: _Arriving, source: int) -> Message:
        """Returns the next message, which is there."""
        segment, offset = self._next(line, source)
        if line.read > _PAGE_ENTRIES:
            free = line.segment.semaphore(line.offset)
            line.segment, line.offset, line.read = segment, offset, 0
            raise_semaphore(free)
            segment, offset = self._next(line, source)
        view = segment.view
        text_bytes, header_bytes = _LENGTHS.unpack_from(view, offset + HEAD_BYTES)
        text_at = offset + HEAD_BYTES + _LENGTHS.size
        header_at = text_at + text_bytes
        packing = packing_from(bytes(view[text_at:header_at]))
        header = bytes(view[header_at : header_at + header_bytes])
        freed = segment.semaphore(offset)
        if not packing.nbytes:
            raise_semaphore(freed)
            return Message(header, tuple(torch.empty(form.shape, dtype=form.dtype) for form in packing.forms))
        tensors_at = offset + align(header_at - offset + header_bytes)
        held = view[tensors_at : tensors_at + packing.nbytes]
        self._free_with(held, segment, freed)
        return Message(header, tuple([_read_tensor(held, form) for form in packing.forms]))

    def _next(self, line: _Arriving, source: int) -> tuple[Segment, int]:
        """Returns where the block of the next entry is."""
        at = line.offset + HEAD_BYTES + line.read * _ENTRY.size
        number, fd, nbytes, offset = _ENTRY.unpack_from(line.segment.view, at)
        segment = self._others[source].get(number, fd=fd, nbytes=nbytes)
        line.read += 1
        return segment, offset

    def _free_with(self, held: memoryview, segment: Segment, freed: ctypes.c_void_p) -> None:
        """Frees a block once the memory of its tensors is let go of, see [Note: memory of a message].

        Runs in whatever thread lets go of it, at the end of the process too: needs nothing but what it has at hand.
        """
        references, process = self._held, self._process
        own_process, free = os.getpid, raise_semaphore
        key = freed.value or 0

        def release(_: weakref.ref[memoryview], segment: Segment = segment) -> None:
            del segment  # keeps the memory mapped until the semaphore has been raised
            if own_process() == process:
                references.pop(key, None)
                free(freed)

        references[key] = weakref.ref(held, release)

    def _wait_for(self, line: _Arriving, source: int, lane: Lane, label: str) -> None:
        """Returns once there is a message on a line, and takes it off the count."""
        for _ in range(self._looks):
            if try_semaphore(line.count):
                return
        began_s = time.monotonic()
        self._say(f"waits in {self._wait_name(source, label)}{self._where}")
        while not wait_for_semaphore(line.count, nap_s=_NAP_S):
            waited_s = time.monotonic() - began_s
            reason = self._gone(source)
            if not reason and waited_s < self._timeout_s:
                continue
            if try_semaphore(line.count):
                break  # it was sent before its sender went
            theirs = self._words_of(source)
            last = f"rank {self._ranks[source]} {theirs}" if theirs and not reason else ""
            raise self._missing(source, lane, label, waited_s=waited_s, reason=reason, last=last)
        self._say("")

    def _gone(self, rank: int) -> str:
        """Returns how a rank has gone; nothing if it is there."""
        if self._words[rank][0]:
            return "left the job"
        return "has ended" if select.select([self._alive[rank]], [], [], 0)[0] else ""

    def _say(self, text: str) -> None:
        """Leaves words about this rank, for the errors of others."""
        data = text.encode()[: _WORDS_BYTES - _WORDS.size]
        words = self._words[self.rank]
        words[_WORDS.size : _WORDS.size + len(data)] = data
        _WORDS.pack_into(words, 0, 0, len(data))

    def _words_of(self, rank: int) -> str:
        _, length = _WORDS.unpack_from(self._words[rank])
        return bytes(self._words[rank][_WORDS.size : _WORDS.size + length]).decode("utf-8", "replace")

    def _open_line(self, memory: mmap.mmap, to: int, lane: Lane) -> _Outgoing:
        """Makes the semaphore and the first page of a line, see [Note: lines]."""
        offset = _line_offset(to, lane)
        page = self._blocks.take(_PAGE_BYTES)
        memory[offset + SEMAPHORE_BYTES : offset + SEMAPHORE_BYTES + _ENTRY.size] = _entry_of(page)
        count = page.segment.semaphore(offset)
        make_semaphore(count)
        return _Outgoing(count, page)

    def _find_line(self, rank: int, lane: Lane) -> _Arriving:
        first = self._others[rank].get(0, fd=-1, nbytes=_FIRST_BYTES)
        offset = _line_offset(self.rank, lane)
        number, _, _, page = _ENTRY.unpack_from(first.view, offset + SEMAPHORE_BYTES)
        assert number == 0, "first pages lie in the first segment"
        return _Arriving(first.semaphore(offset), first, page)
