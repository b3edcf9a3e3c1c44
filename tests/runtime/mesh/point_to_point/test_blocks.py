"""Blocks are used again once they were freed, the longest given away first, and segments are added as needed."""

from __future__ import annotations

import mmap
import os

import pytest

from dsrun.runtime.mesh.host_memory.semaphores import raise_semaphore
from dsrun.runtime.mesh.point_to_point.blocks import HEAD_BYTES, Blocks, OthersSegments


def test_a_block_is_used_again_once_it_was_freed() -> None:
    blocks = Blocks(mmap.mmap(-1, 1 << 16), used_bytes=64)
    first, second = blocks.take(1000), blocks.take(1000)
    assert first.offset != second.offset
    taken = blocks.nbytes
    raise_semaphore(second.freed)
    assert blocks.take(990).offset == second.offset
    raise_semaphore(first.freed)
    raise_semaphore(second.freed)
    assert [blocks.take(1000).offset for _ in range(2)] == [first.offset, second.offset]
    assert blocks.nbytes == taken
    assert blocks.take(1000).offset not in (first.offset, second.offset)


@pytest.mark.parametrize("nbytes", [0, 1, 447, 448, 449, 1000, 4032, 4033, 65_536, 1_000_003])
def test_a_block_has_room_and_little_more(nbytes: int) -> None:
    block = Blocks(mmap.mmap(-1, 1 << 21), used_bytes=0).take(nbytes)
    assert block.nbytes % 64 == 0
    assert HEAD_BYTES + nbytes <= block.nbytes <= max(512, 1.25 * (HEAD_BYTES + nbytes) + 64)


def test_what_does_not_fit_lies_in_a_segment_that_others_open() -> None:
    first = mmap.mmap(-1, 4096)
    blocks = Blocks(first, used_bytes=0)
    block = blocks.take(8000)
    assert (block.number, block.offset) == (1, 0)
    block.segment.view[100:105] = b"hello"
    seen = OthersSegments(first, process=os.getpid())
    segment = seen.get(block.number, fd=block.segment.fd, nbytes=block.segment.nbytes)
    assert bytes(segment.view[100:105]) == b"hello"
    raise_semaphore(segment.semaphore(block.offset))
    assert blocks.take(8000) is block
    seen.close()
    blocks.close()
    assert bytes(segment.view[100:105]) == b"hello"
