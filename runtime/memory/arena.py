"""Memory of one kind and dtype, handed out as views.

[Note: arenas] Long-lived buffers whose sizes are known come from one allocation a kind, so an allocator has nothing to
scatter, what is held can be said to the byte, and memory that does not suffice shows when the engine is made. Buffers
that come and go (`grows`) come from an arena too, which allocates only until it has been as large as it must be.

Reuse is ordered by the stream, as everywhere: what was given back is overwritten by work that is enqueued later.
Where that memory comes from (shared between ranks or not) is the business of who makes an arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .pages import let_go_of, take_again
from .spans import Spans

#: Views begin at multiples of so many elements: 512 bytes in 16-bit formats, and as shards are cut.
VIEW_ALIGN = 256
#: Elements that are copied at once where a buffer moves onto itself.
_MOVE_NUMEL = 1 << 20

#: Behind the names of arenas on the device, where others of their kind are in host memory or on a disk.
STAYING = " that stay"
#: Likewise, of those that have come from there.
MOVED = " that came back"

#: Where memory lies: on the device that computes, or on its host; where the device is the CPU, two parts of its RAM.
#: What is on a disk has addresses alone, and takes no memory.
Tier = Literal["device", "host", "disk"]

#: Makes flat, zeroed memory of so many elements.
Zeros = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """One arena, in bytes.

    Attributes:
        name: name of the arena, which says what it is for.
        tier: tier of the memory: the device that computes, host memory apart from it, or the disk.
        dtype: dtype of the elements, as text such as `float32`.
        reserved_bytes: bytes that were allocated.
        used_bytes: bytes that are handed out now; views are rounded up to `VIEW_ALIGN` elements.
        high_water_bytes: the most that was handed out at once.
        hole_bytes: free memory below what is in use: what lifetimes have left.
    """

    name: str
    tier: Tier
    dtype: str
    reserved_bytes: int
    used_bytes: int
    high_water_bytes: int
    hole_bytes: int


@dataclass(slots=True)
class _Lease:
    numel: int
    moved: Callable[[Tensor], None] | None


class _Block:
    """One allocation.

    Args:
        memory: all of a storage.
        apart: views have storages of their own.
    """

    def __init__(self, memory: Tensor, *, apart: bool) -> None:
        self._apart = apart
        assert memory.storage_offset() == 0, "a block begins where its storage begins"
        self.memory = memory
        self.spans = Spans(memory.numel())
        self.leases: dict[int, _Lease] = {}

    def may_move(self, start: int) -> bool:
        return self.leases[start].moved is not None

    def view(self, start: int, numel: int) -> Tensor:
        """Returns elements [start, start + numel) as a tensor whose storage is these bytes alone.

        With the storage of the whole block, saving one parameter would save them all, and what compilers and memory
        reports find out about one view would hold for every other. The block lives as long as any of its views.
        Views of an arena that leaves share its storage, for that is what goes and comes back.
        """
        if not self._apart:
            return self.memory.narrow(0, start, numel)
        itemsize = self.memory.element_size()
        storage = self.memory.untyped_storage()[start * itemsize : (start + numel) * itemsize]
        return torch.empty(0, dtype=self.memory.dtype, device=self.memory.device).set_(storage)

    def start_of(self, view: Tensor) -> int | None:
        """Returns the element at which `view` lies in this block, if it does."""
        offset = view.data_ptr() - self.memory.data_ptr()
        inside = 0 <= offset < self.memory.numel() * self.memory.element_size()
        return offset // self.memory.element_size() if inside else None


class Arena:
    """See [Note: arenas].

    Args:
        name: name of the arena, which says what it is for.
        zeros: function that makes the arena's memory, and so decides its dtype and device.
        numel: elements to reserve now, of all views that will be out at once; see `room_for`.
        grows: allocate more when views do not fit; else that is an error of who reserved.
        tier: tier of the memory, for reports.
        leaves: may be put away and brought back; its memory is of this process alone, and no script sees its views.
    """

    def __init__(
        self,
        name: str,
        zeros: Zeros,
        *,
        numel: int = 0,
        grows: bool = False,
        tier: Tier = "device",
        leaves: bool = False,
    ) -> None:
        self.name = name
        self.tier: Tier = tier
        self._leaves = leaves
        self._away: list[tuple[_Block, Tensor | None]] = []
        # Who reserves once may let go of all that it made the memory with.
        self._more = zeros if grows else None
        self._blocks: list[_Block] = [_Block(zeros(numel), apart=not leaves)] if numel else []
        self._empty = zeros(0)
        self._used = 0
        self._high_water = 0

    def take(self, numel: int, *, moved: Callable[[Tensor], None] | None = None) -> Tensor:
        """Returns a flat view of `numel` elements; what it holds is undefined, but for zeros the first time.

        Args:
            numel: elements.
            moved: callback that gets the new view, with the same values, when `compact` has moved it; the old view must
                not be used any more. None for a view that stays where it is.
        """
        if numel == 0:
            return self._empty
        rounded = room_for([numel])
        block, start = self._find(rounded)
        block.leases[start] = _Lease(numel, moved)
        self._used += rounded
        self._high_water = max(self._high_water, self._used)
        return block.view(start, numel)

    def give_back(self, view: Tensor) -> None:
        """Ends the use of a view that `take` returned, or of its successor."""
        if view.numel() == 0:
            return
        for block in self._blocks:
            start = block.start_of(view)
            if start is not None:
                lease = block.leases.pop(start, None)
                assert lease is not None, f"{self.name}: nothing was taken at element {start}, or it was given back"
                block.spans.give_back(start)
                self._used -= room_for([lease.numel])
                return
        raise AssertionError(f"{self.name}: a buffer of {view.numel()} elements was given back that lies elsewhere")

    def release(self) -> None:
        """Gives back the allocations in which nothing is out."""
        self._blocks = [block for block in self._blocks if block.leases]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this arena."""
        return any(block.start_of(tensor) is not None for block in self._blocks)

    def compact(self) -> None:
        """Moves views together, and makes one block of several once nothing is out; between steps.

        No view may be in use by a collective. The memory reserved stays the same.
        """
        if self._more is not None and len(self._blocks) > 1 and not self._used:
            numel = sum(block.spans.size for block in self._blocks)
            self._blocks.clear()  # first, or twice the memory would be needed
            self._blocks.append(_Block(self._more(numel), apart=not self._leaves))
        for block in self._blocks:
            if block.spans.holes:
                _move_together(block)

    @property
    def is_away(self) -> bool:
        """Whether its memory has been put away."""
        return bool(self._away)

    def put_away(self, out: Callable[[Tensor], Tensor] | None) -> int:
        """Gives its memory back until `bring_back`; views must not be used meanwhile. Returns the bytes.

        Args:
            out: copies a block's contents somewhere else, and returns the copy; None: they are not needed any more.
        """
        assert self._leaves, f"arena {self.name} was not made to leave"
        assert not self._away, f"arena {self.name} is away already"
        for block in self._blocks:
            self._away.append((block, None if out is None else out(block.memory)))
            let_go_of(block.memory)
        return sum(block.memory.nbytes for block in self._blocks)

    def bring_back(self, back: Callable[[Tensor, Tensor], None]) -> None:
        """Takes memory again; views then hold what they held, or zeros where that was not needed.

        Args:
            back: copies what `out` returned, its first argument, into a block.
        """
        away, self._away = self._away, []
        for block, copy in away:
            take_again(block.memory)
            if copy is None:
                block.memory.zero_()
            else:
                back(copy, block.memory)

    def use(self) -> ArenaUse:
        """Returns what is reserved and in use."""
        itemsize = self._empty.element_size()
        return ArenaUse(
            name=self.name,
            tier="host" if self._away else self.tier,
            dtype=str(self._empty.dtype).removeprefix("torch."),
            reserved_bytes=sum(block.spans.size for block in self._blocks) * itemsize,
            used_bytes=self._used * itemsize,
            high_water_bytes=self._high_water * itemsize,
            hole_bytes=sum(block.spans.holes for block in self._blocks) * itemsize,
        )

    def _find(self, numel: int) -> tuple[_Block, int]:
        for block in self._blocks:
            start = block.spans.take(numel)
            if start is not None:
                return block, start
        assert self._more is not None, (
            f"arena {self.name}: {numel} elements are wanted, {self._used} of "
            f"{sum(block.spans.size for block in self._blocks)} are handed out"
        )
        block = _Block(self._more(numel), apart=not self._leaves)
        self._blocks.append(block)
        start = block.spans.take(numel)
        assert start is not None, "the block was made for it"
        return block, start


def room_for(numels: Sequence[int]) -> int:
    """Returns the elements to reserve for views of these sizes."""
    return sum(-(-numel // VIEW_ALIGN) * VIEW_ALIGN for numel in numels)


def joined(views: Sequence[Tensor]) -> Tensor | None:
    """Returns flat views that follow each other in one storage as one view; None where they do not.

    An arena that leaves hands such out. What one operation does to all of them is then one call.

    Args:
        views: contiguous and of one dtype. Empty ones are passed over.
    """
    parts = [view for view in views if view.numel()]
    if not parts:
        return None
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return None
        end += part.nbytes
    # Neighbours by chance are memory of two owners.
    if first.untyped_storage().data_ptr() != parts[-1].untyped_storage().data_ptr():
        return None
    return first.as_strided(((end - first.data_ptr()) // first.itemsize,), (1,), first.storage_offset())


def _move_together(block: _Block) -> None:
    for move in block.spans.compact(block.may_move):
        # Downwards and piece by piece: a piece overwrites nothing but what has been read.
        for first in range(0, move.numel, _MOVE_NUMEL):
            numel = min(_MOVE_NUMEL, move.numel - first)
            piece = block.memory.narrow(0, move.source + first, numel).clone()
            block.memory.narrow(0, move.target + first, numel).copy_(piece)
        lease = block.leases.pop(move.source)
        block.leases[move.target] = lease
        assert lease.moved is not None, "only such spans move"
        lease.moved(block.view(move.target, lease.numel))
