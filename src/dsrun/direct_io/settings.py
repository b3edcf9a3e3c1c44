"""How a file is read and written: sizes and depths as the section `aio` has them, and what calls they make. Pure.

[Note: calls]
`block_bytes * queue_depth * threads` bytes are on their way at once, whatever else is set; they are cut into calls by
one of three rules. The kernel cuts a large call into requests of its own and gives the disk all of them before it
waits, so few large calls keep a disk as busy as many small ones, for less of the processor.
- usual (`overlap_events`): two calls a thread of half the depth each, so that the disk has work while one ends;
- without `overlap_events`: one call a thread, of the whole depth;
- `single_submit`: one call a block, as many at once as the depth says; they overlap by nature.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

#: Extents, offsets and the memory of direct calls are multiples of this: the block of any disk there is, and a page.
ALIGN = max(4096, mmap.PAGESIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class IoSettings:
    """See [Note: calls].

    Attributes:
        block_bytes: unit in which depth is counted; rounded up to `ALIGN`.
        queue_depth: blocks on their way at once, for each thread.
        threads: number of threads that read, and as many that write; calls at once may be more, see `calls_at_once`.
        single_submit: one call a block.
        overlap_events: the next call is given before the last has ended.
        verify: checksum what is written, and compare when it is read.
    """

    block_bytes: int = 1 << 20
    queue_depth: int = 8
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        least = min(self.block_bytes, self.queue_depth, self.threads)
        assert least > 0, f"sizes and depths are at least 1: {self}"

    @property
    def calls_at_once(self) -> int:
        """Calls on their way at once in one direction; a thread of the operating system each."""
        if self.single_submit:
            return self.threads * self.queue_depth
        return self.threads * (2 if self._overlaps else 1)

    @property
    def call_bytes(self) -> int:
        """Longest call."""
        if self.single_submit:
            return round_up(self.block_bytes)
        return round_up(self.block_bytes) * (-(-self.queue_depth // 2) if self._overlaps else self.queue_depth)

    @property
    def _overlaps(self) -> bool:
        return self.overlap_events and self.queue_depth > 1


def round_up(count: int) -> int:
    """Returns the next multiple of `ALIGN`."""
    return -(-count // ALIGN) * ALIGN
