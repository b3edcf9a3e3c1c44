"""Room in a file: used again by size, made anew when sizes have changed, and counted over all files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsrun.direct_io.buffers import huge_buffer
from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import ALIGN, IoSettings
from dsrun.errors import OffloadError
from dsrun.runtime.activation.keep.disk_room import DiskRoom
from support.disks import FailingDisk


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., DiskRoom]:
    def room(calls: FailingDisk | None = None) -> DiskRoom:
        return DiskRoom(lambda: ExtentFile([str(tmp_path)], IoSettings(), what="activations", calls=calls))

    return room


def test_what_is_given_back_is_taken_first_where_it_has_the_size(make: Callable[..., DiskRoom]) -> None:
    room = make()
    first = room.take(100)
    second = room.take(3 * ALIGN - 1)
    assert (first.nbytes, second.nbytes) == (ALIGN, 3 * ALIGN)
    room.give_back(first, [])
    assert room.take(2 * ALIGN) not in (first, second)
    assert room.take(ALIGN) == first
    assert room.nbytes == 6 * ALIGN


def test_an_extent_under_way_is_waited_for_before_it_is_another_s(make: Callable[..., DiskRoom]) -> None:
    room = make()
    extent = room.take(ALIGN)
    data = memoryview(huge_buffer(ALIGN))
    for _ in range(20):
        writing = room.file.write(extent, data)  # refused while one is under way
        room.give_back(extent, [writing])
        assert room.take(ALIGN) == extent
        assert writing.is_done


def test_a_file_of_sizes_that_are_gone_is_made_anew_and_counted_on(make: Callable[..., DiskRoom]) -> None:
    room = make()
    data = memoryview(huge_buffer(ALIGN))
    for size in (8, 1, 1):
        room.begin()
        extents = [room.take(size * ALIGN) for _ in range(4)]
        if size == 1:
            room.file.write(extents[0], data).wait()
        for extent in extents:
            room.give_back(extent, [])
    assert room.nbytes == 4 * ALIGN
    assert room.counts().written_bytes == 2 * ALIGN


def test_where_there_is_no_room_nothing_is_taken(make: Callable[..., DiskRoom]) -> None:
    disk = FailingDisk(free=0)
    room = make(disk)
    with pytest.raises(OffloadError, match="are free"):
        room.take(ALIGN)
    disk.free = None
    room.begin()
    assert room.take(ALIGN).nbytes == ALIGN
