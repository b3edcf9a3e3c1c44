"""Memory of one rank that others of its host read: blocks that are given away, and used again once they are free.

Knows no message. The owner gives a block away; who has got it frees it, in another process, by raising the semaphore
at its head. The owner finds that out when it needs a block of that size again, so nothing has to be sent for it.

[Note: sizes of blocks] A block has one of four sizes an octave and keeps it for good: what one step took, the next
step finds. Nothing is given back to the system before the end. Pages that were never written take no memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsrun.files.private import make_private_memory

from ..host_memory.segments import map_segment
from ..host_memory.semaphores import SEMAPHORE_BYTES, make_semaphore, try_semaphore
from .packing import Packing, places_in

#: Bytes at the start of a block that are its semaphore's.
HEAD_BYTES = SEMAPHORE_BYTES
#: Of the segments behind the first one.
_SEGMENT_BYTES = 1 << 28
_SMALLEST_BYTES = 512
_CPU = torch.device("cpu")


class Segment:
    """A run of memory that ranks share, as this process has mapped it.

    Args:
        memory: the mapping; kept for as long as a tensor or a block lies in it.
        fd: descriptor by which other processes open it; -1 where they have it already.

    Attributes:
        fd: descriptor by which other processes open it; -1 for none.
        nbytes: length of the memory in bytes.
        view: bytes of the memory.
        storage: the same, for torch.
    """

    def __init__(self, memory: mmap.mmap, fd: int = -1) -> None:
        self.fd = fd
        self.nbytes = len(memory)
        self.view = memoryview(memory)
        self.storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        #: Kept, because semaphores are used by address.
        self._anchor = ctypes.c_char.from_buffer(memory)
        self._base = ctypes.addressof(self._anchor)

    def semaphore(self, offset: int) -> ctypes.c_void_p:
        """Returns the address of the semaphore that lies at an offset."""
        return ctypes.c_void_p(self._base + offset)


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment.

    Attributes:
        number: number of the segment, among those of its owner.
        segment: the segment.
        offset: first byte of the block, which is its head's.
        nbytes: length of the block, its head included.
        freed: semaphore that says that the block may be used again.
        packing: packing of the tensors that were written into it last; None for none.
        places: those tensors' places in the block, which the next message mostly has too.
        start: offset of the first tensor in the segment.
    """

    number: int
    segment: Segment
    offset: int
    nbytes: int
    freed: ctypes.c_void_p
    packing: Packing | None = None
    places: list[Tensor | None] = field(default_factory=list[Tensor | None])
    start: int = -1

    def places_of(self, packing: Packing, *, start: int) -> list[Tensor | None]:
        """Returns where tensors lie in the block, see `places_in`."""
        if packing is not self.packing or start != self.start:
            # They outlast the call, so they must be none of inference mode's, which may be written to in it alone.
            with torch.inference_mode(False):
                self.places = places_in(packing, self.segment.storage, start=start, device=_CPU)
            self.packing, self.start = packing, start
        return self.places


class Blocks:
    """The memory that one rank gives away.

    Args:
        first: first segment, zeroed, which the other ranks have mapped.
        used_bytes: bytes at its start that are in other use.
    """

    def __init__(self, first: mmap.mmap, *, used_bytes: int) -> None:
        self._segments = [Segment(first)]
        self._used_bytes = used_bytes
        #: Blocks that were given away, by size, the longest ago first.
        self._given: dict[int, deque[Block]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that were ever made."""
        return sum(block.nbytes for blocks in self._given.values() for block in blocks)

    def take(self, nbytes: int) -> Block:
        """Returns a block that has room for so many bytes behind its head, and counts as given away.

        Raises:
            OSError: no more memory can be shared.
        """
        size = _size_for(HEAD_BYTES + nbytes)
        given = self._given.get(size)
        if given is None:
            given = self._given[size] = deque()
        for position, block in enumerate(given):
            if try_semaphore(block.freed):
                if position:
                    del given[position]
                    given.append(block)
                else:
                    given.rotate(-1)
                return block
        block = self._make(size)
        given.append(block)
        return block

    def close(self) -> None:
        """Lets go of the memory, which goes with the last tensor in it."""
        for segment in self._segments:
            if segment.fd >= 0:
                os.close(segment.fd)
        self._segments = []
        self._given = {}

    def _make(self, size: int) -> Block:
        if self._used_bytes + size > self._segments[-1].nbytes:
            self._segments.append(_make_segment(max(size, _SEGMENT_BYTES)))
            self._used_bytes = 0
        segment, offset = self._segments[-1], self._used_bytes
        self._used_bytes += size
        freed = segment.semaphore(offset)
        make_semaphore(freed)
        return Block(len(self._segments) - 1, segment, offset, size, freed)


class OthersSegments:
    """The segments of another rank, mapped when they are first heard of.

    Args:
        first: first segment of that rank.
        process: id of its process.
    """

    def __init__(self, first: mmap.mmap, *, process: int) -> None:
        self._process = process
        self._segments = {0: Segment(first)}

    def get(self, number: int, *, fd: int, nbytes: int) -> Segment:
        """Returns a segment.

        Args:
            number: number of the segment.
            fd: descriptor that the segment has in that rank's process.
            nbytes: bytes of the segment.

        Raises:
            OSError: the process has ended, and this rank has not mapped the segment before.
        """
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = Segment(map_segment(self._process, fd, nbytes))
        return segment

    def close(self) -> None:
        """Lets go of the segments, which go with the last tensor in them."""
        self._segments = {}


def _size_for(nbytes: int) -> int:
    """Returns the size of a block that has so many bytes, see [Note: sizes of blocks]."""
    if nbytes <= _SMALLEST_BYTES:
        return _SMALLEST_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _make_segment(nbytes: int) -> Segment:
    fd = make_private_memory("dsrun")
    try:
        os.ftruncate(fd, nbytes)
        return Segment(mmap.mmap(fd, nbytes), fd)
    except OSError:
        os.close(fd)
        raise
