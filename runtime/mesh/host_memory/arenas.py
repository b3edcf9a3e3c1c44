"""Buffers that all ranks of one host see at the same place of the same segment. Knows no collective.

Every rank makes the same buffers in the same order, so the segment and the offset of a buffer tell every rank where it
is, its own and those of its peers.
"""

from __future__ import annotations

import logging
import mmap
from bisect import bisect_right

import torch
from torch import Tensor

from .segments import Exchange, share_memory

#: Of a segment; a page that nobody has written takes no memory. Each takes a descriptor a rank.
_SEGMENT_BYTES = 1 << 30
#: Buffers begin at a cache line.
_ALIGNMENT_BYTES = 64

_log = logging.getLogger(__name__)


class SharedArenas:
    """The shared segments of the ranks of one host, as one rank sees them.

    Args:
        rank: number of this rank among the ranks of the host.
        exchange: function that gives every rank the numbers of all ranks; see `segments.Exchange`.
        mailbox_bytes: bytes of each rank's buffer in `mailboxes`, which exists from the start.

    Raises:
        OSError: no memory can be shared; on every rank.

    Attributes:
        mailboxes: a buffer of every rank, in rank order; uint8.
    """

    def __init__(self, rank: int, exchange: Exchange, *, mailbox_bytes: int) -> None:
        self._rank = rank
        self._exchange = exchange
        #: This rank's own segments, and the bytes of every rank's, by segment.
        self._own: list[mmap.mmap] = []
        self._segments: list[list[Tensor]] = []
        #: Addresses of this rank's own segments, ascending, and the numbers of those segments.
        self._bases: list[int] = []
        self._numbers: list[int] = []
        self.mailboxes = self._share(mailbox_bytes)
        #: Bytes of the newest segment that are given away.
        self._used_bytes = mailbox_bytes

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeroed memory that the peers see; every rank must call, with the same size.

        Where no more memory can be shared, it is this rank's alone, on every rank, with a warning.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(0, dtype=dtype)
        if self._used_bytes + nbytes > self._segments[-1][self._rank].numel():
            try:
                self._share(max(nbytes, _SEGMENT_BYTES))
            except OSError as error:
                _log.warning("%s bytes cannot be shared (%s): they are moved in pieces", nbytes, error)
                return torch.zeros(numel, dtype=dtype)
            self._used_bytes = 0
        segment = self._own[-1]
        start = self._used_bytes
        self._used_bytes = -(-(start + nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # Of its own bytes alone, so that what a tensor holds is what it seems to hold.
        return torch.frombuffer(segment, dtype=dtype, count=numel, offset=start)

    def locate(self, buffer: Tensor) -> tuple[int, int]:
        """Returns number and offset (bytes) of the segment in which a buffer lies; -1 where it lies in none."""
        address = buffer.data_ptr()
        at = bisect_right(self._bases, address) - 1
        if at < 0 or not buffer.is_contiguous():
            return -1, 0
        number = self._numbers[at]
        offset = address - self._bases[at]
        nbytes = buffer.numel() * buffer.element_size()
        return (number, offset) if offset + nbytes <= self._segments[number][self._rank].numel() else (-1, 0)

    def view(self, rank: int, place: int, offset: int, *, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the buffer of any rank that it located at `place` and `offset`."""
        return self._segments[place][rank][offset : offset + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Lets go of the segments; memory goes with its last tensor."""
        self._own, self._segments, self._bases, self._numbers, self.mailboxes = [], [], [], [], []

    def _share(self, nbytes: int) -> list[Tensor]:
        """Makes a segment a rank; returns the bytes of all, in rank order."""
        made = share_memory(nbytes, self._exchange)
        self._own.append(made[self._rank])
        segments = [torch.frombuffer(segment, dtype=torch.uint8) for segment in made]
        base = segments[self._rank].data_ptr()
        at = bisect_right(self._bases, base)
        self._bases.insert(at, base)
        self._numbers.insert(at, len(self._segments))
        self._segments.append(segments)
        return segments
