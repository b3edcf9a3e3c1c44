"""Memory for direct calls is aligned, zeroed, and costs nothing until it is written."""

from __future__ import annotations

import mmap

from dsrun.direct_io.buffers import address_of, huge_buffer
from dsrun.direct_io.settings import ALIGN


def test_a_buffer_is_zeroed_aligned_and_as_long_as_asked() -> None:
    buffer = huge_buffer(3 * ALIGN + 1)
    view = memoryview(buffer)
    assert view.nbytes == 3 * ALIGN + 1
    assert not any(view)
    address = address_of(view)
    assert address is not None
    assert address % mmap.PAGESIZE == 0


def test_a_part_of_a_buffer_lies_where_it_begins() -> None:
    view = memoryview(huge_buffer(2 * ALIGN))
    whole, part = address_of(view), address_of(view[100:])
    assert whole is not None
    assert part == whole + 100


def test_memory_that_may_only_be_read_or_is_empty_has_no_known_place() -> None:
    assert address_of(memoryview(b"abc")) is None
    assert address_of(memoryview(bytearray())) is None
