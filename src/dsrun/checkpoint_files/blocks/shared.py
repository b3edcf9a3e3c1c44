"""Blocks that several ranks of a host want: one of them reads each, and the others have it piece by piece from memory.

[Note: nobody depends on a peer] Ranks say in shared memory which blocks they want. From that each of them knows who
reads which block for all; nothing is agreed upon. A rank that waits in vain for a peer, or is told to, reads what is
missing itself. Each of them hashes all of a block, however it came, and so finds and names damage itself. A rank that
has waited in vain shares nothing any more: nothing is overwritten that a slow peer may still read.

[Note: no circle] All ranks go through files and blocks in one order, and a block's memory is free when its takers are
done with an earlier one. So of all blocks that are not done the first waits for none.

[Note: little memory] Pages of shared memory are small ones mostly, and the first touch of each costs more than a copy:
with four whole blocks a rank a load took 0.43 s of 512 MiB, of which 0.25 s were the processor's.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.direct_io.buffers import address_of

from ..index.value import BLOCK_BYTES, Index
from .pieces import PIECE_BYTES, Sink

#: Blocks that a rank gives at a time, and how many pieces of each are there at a time.
_LANES = 4
_DEEP = 2
#: A peer that does nothing for so long is not waited for any more.
PATIENCE_S = 10.0
_NAP_S = 0.001
#: Bytes of a rank's memory, and where its tables begin, of a byte a block: wanted; pieces given; pieces taken; lane.
_BEGUN, _ENDED, _BEAT = 0, 1, 2
_TABLES_AT, _TABLES = 64, 4
#: In place of a number of pieces: no more are given, or taken.
_NO_MORE = 255


def shared_bytes(index: Index) -> int:
    """Returns the size of the memory that each rank shares; pages that are not used take no room."""
    return _slots_at(_count(index)) + _LANES * _DEEP * PIECE_BYTES


class SharedBlocks:
    """This rank's view of the memory of all ranks of its host, for one pass over a checkpoint.

    Args:
        segments: shared memory of each rank of the host, zeroed, each of `shared_bytes` bytes.
        mine: number of this rank's.
        index: the checkpoint's, the same on all ranks.
        patience_s: seconds without progress after which this rank no longer waits for a peer; see `PATIENCE_S`.
    """

    def __init__(
        self, segments: Sequence[mmap.mmap], mine: int, index: Index, *, patience_s: float = PATIENCE_S
    ) -> None:
        count = _count(index)
        self._views = [memoryview(segment) for segment in segments]
        self._mine = mine
        self._patience_s = patience_s
        self._first: dict[str, int] = {}
        first = 0
        for name in sorted(index.files):
            self._first[name] = first
            first += _blocks_in(index, name)
        self._wanted, self._given, self._taken, self._lane = (
            [view[_TABLES_AT + n * count : _TABLES_AT + (n + 1) * count] for view in self._views]
            for n in range(_TABLES)
        )
        self._slots_at = _slots_at(count)
        self._owner: dict[int, int] = {}
        self._takers: dict[int, list[int]] = {}
        self._before: dict[int, int] = {}  # what had a block's lane before
        self._lost: set[int] = set()

    def begin(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Says which blocks of which files this rank wants, and hears what its peers want."""
        blocks = sorted(self._first[name] + number for name, numbers in wanted.items() for number in numbers)
        for block in blocks:
            self._wanted[self._mine][block] = 1
        self._views[self._mine][_BEGUN] = 1
        for peer, view in enumerate(self._views):
            if not self._wait(peer, lambda view=view: bool(view[_BEGUN])):
                self.end()
                return
        tables = [bytes(table) for table in self._wanted]
        own: list[int] = []
        for block in blocks:
            wanting = [peer for peer, table in enumerate(tables) if table[block]]
            if len(wanting) > 1:
                owner = self._owner[block] = wanting[block % len(wanting)]
                self._takers[block] = [peer for peer in wanting if peer != owner]
                if owner == self._mine:
                    self._lane[owner][block] = len(own) % _LANES
                    own.append(block)
        self._before = dict(zip(own[_LANES:], own, strict=False))

    def end(self) -> None:
        """Says that this rank gives and takes nothing any more; its peers go on taking what it has given."""
        self._views[self._mine][_ENDED] = 1
        self._owner.clear()

    def is_given(self, name: str, number: int) -> bool:
        """Whether this rank reads a block for others."""
        return self._owner.get(self._first[name] + number) == self._mine

    def is_taken(self, name: str, number: int) -> bool:
        """Whether another rank reads a block for this one."""
        return self._owner.get(self._first[name] + number, self._mine) != self._mine

    def give(self, name: str, number: int, piece: int, data: memoryview) -> None:
        """Lets the others have the next piece of a block, unless one of them keeps the rank waiting in vain."""
        block = self._first[name] + number
        if piece == 0 and block in self._before:
            self._wait_for_takers(self._before[block], _NO_MORE)
        self._wait_for_takers(block, piece - _DEEP + 1)
        if self._lost:
            self._given[self._mine][block] = _NO_MORE
        if self._given[self._mine][block] != _NO_MORE:
            _copy(self._slot(self._mine, block, piece), data)
            self._given[self._mine][block] = piece + 1
        self.beat()

    def end_giving(self, name: str, number: int) -> None:
        """Says that a block could not be read to its end: others read themselves what they have not."""
        self._given[self._mine][self._first[name] + number] = _NO_MORE

    def take(self, name: str, number: int, piece: int) -> memoryview | None:
        """Returns a piece that another rank has read, until it is let go of; None where this one has to read it."""
        block = self._first[name] + number
        owner = self._owner[block]
        given, view = self._given[owner], self._views[owner]
        self._wait(owner, lambda: given[block] > piece or bool(view[_ENDED]))
        if self._lost or not piece < given[block] < _NO_MORE:
            return None
        return self._slot(owner, block, piece)

    def let_go(self, name: str, number: int, piece: int | None = None) -> None:
        """Says that this rank needs a piece of a block of another's no more; None: no piece."""
        self.beat()
        self._taken[self._mine][self._first[name] + number] = _NO_MORE if piece is None else piece + 1

    def beat(self) -> None:
        """Says that this rank is at work."""
        mine = self._views[self._mine]
        mine[_BEAT] = (mine[_BEAT] + 1) % 256

    def _wait_for_takers(self, block: int, least: int) -> None:
        for peer in self._takers[block]:
            taken, view = self._taken[peer], self._views[peer]
            self._wait(peer, lambda taken=taken, view=view: taken[block] >= least or bool(view[_ENDED]))

    def _wait(self, peer: int, is_there: Callable[[], bool]) -> bool:
        """Returns whether something is so that a peer sees to; waits for it while that one is at work."""
        seen, since = -1, 0.0
        while not is_there():
            if peer in self._lost:
                return False
            now, beat = time.monotonic(), self._views[peer][_BEAT]
            if beat != seen:
                seen, since = beat, now
            elif now - since > self._patience_s:
                self._lost.add(peer)
                return False
            self.beat()
            time.sleep(_NAP_S)
        return True

    def _slot(self, owner: int, block: int, piece: int) -> memoryview:
        number = self._lane[owner][block] * _DEEP + piece % _DEEP
        first = self._slots_at + number * PIECE_BYTES
        return self._views[owner][first : first + PIECE_BYTES]


@dataclass(frozen=True, slots=True)
class SentBlock:
    """A sink for a block that other ranks take too."""

    sink: Sink
    sharing: SharedBlocks
    name: str
    number: int

    def take(self, first: int, data: memoryview) -> None:
        """See `Sink`."""
        self.sharing.give(self.name, self.number, first % BLOCK_BYTES // PIECE_BYTES, data)
        self.sink.take(first, data)


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A sink for a block that another rank has read."""

    sink: Sink
    sharing: SharedBlocks
    name: str
    number: int

    def take(self, first: int, data: memoryview) -> None:
        """See `Sink`."""
        self.sink.take(first, data)
        self.sharing.let_go(self.name, self.number, first % BLOCK_BYTES // PIECE_BYTES)


def _copy(into: memoryview, data: memoryview) -> None:
    """Copies, and lets other threads run meanwhile, as a slice would not."""
    to, at = address_of(into), address_of(data)
    assert to is not None, "memory that is shared may be written"
    assert at is not None, "so may what is read to"
    ctypes.memmove(to, at, len(data))


def _blocks_in(index: Index, name: str) -> int:
    return -(-index.files[name].nbytes // BLOCK_BYTES)


def _count(index: Index) -> int:
    return sum(_blocks_in(index, name) for name in index.files)


def _slots_at(count: int) -> int:
    """Returns where pieces begin, at a page."""
    return -(-(_TABLES_AT + _TABLES * count) // mmap.PAGESIZE) * mmap.PAGESIZE
