"""What was written comes back, bit for bit, from any memory, over any number of paths; else an error says where."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsrun.direct_io.buffers import huge_buffer
from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import ALIGN, IoSettings
from dsrun.errors import OffloadError
from support.disks import FailingDisk, failure

SMALL = IoSettings(block_bytes=ALIGN, queue_depth=4)  # calls of two blocks, two at once
DEADLINE_S = 60


def noise(nbytes: int, seed: int = 0) -> memoryview:
    buffer = memoryview(huge_buffer(nbytes))
    buffer[:] = random.Random(seed).randbytes(nbytes)
    return buffer


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    found = [tmp_path / name for name in ("a", "b", "c")]
    for folder in found:
        folder.mkdir()
    return [str(folder) for folder in found]


@pytest.fixture
def file(folders: list[str]) -> Iterator[ExtentFile]:
    opened = ExtentFile(folders[:1], SMALL, what="test data")
    yield opened
    opened.close()


@pytest.mark.parametrize("paths", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, ALIGN - 1, ALIGN, 3 * ALIGN, 10 * ALIGN + 7])
@pytest.mark.parametrize("verify", [False, True])
def test_extents_come_back_as_they_were_written(folders: list[str], paths: int, nbytes: int, verify: bool) -> None:
    settings = IoSettings(block_bytes=ALIGN, queue_depth=4, verify=verify)
    file = ExtentFile(folders[:paths], settings, what="test data")
    extents = [file.reserve(f"unit {number}", nbytes) for number in range(3)]
    file.allocate()
    for _ in range(2):  # and again, over what is there
        writes = [file.write(extent, noise(nbytes, seed)) for seed, extent in enumerate(extents)]
        for write in writes:
            write.wait()
        for seed, extent in reversed(list(enumerate(extents))):
            into = memoryview(huge_buffer(nbytes))
            file.read(extent, into).wait()
            assert into == noise(nbytes, seed)
    file.close()


@pytest.mark.parametrize("shift", [0, 1, 512, ALIGN])
def test_memory_anywhere_will_do(file: ExtentFile, shift: int) -> None:
    nbytes = (2 << 20) + 5000  # more than what goes through a buffer at once
    extent = file.reserve("unit", nbytes)
    file.allocate()
    memory = memoryview(huge_buffer(nbytes + shift))[shift:]
    memory[:] = noise(nbytes)
    file.write(extent, memory).wait()
    into = memoryview(bytearray(nbytes + 1))[1:]
    file.read(extent, into).wait()
    assert into == memory
    file.write(extent, memoryview(bytes(nbytes))).wait()  # memory that may only be read
    file.read(extent, into).wait()
    assert not any(into)


def test_what_is_moved_is_counted_to_the_byte(file: ExtentFile) -> None:
    extent, odd = file.reserve("unit", 8 * ALIGN), file.reserve("odd", ALIGN + 1)
    assert file.reserved_bytes == 10 * ALIGN
    file.allocate()
    file.write(extent, noise(extent.nbytes)).wait()
    file.read(extent, noise(extent.nbytes)).wait()
    file.read(extent, noise(extent.nbytes)).wait()
    first = file.counts()
    assert (first.written_bytes, first.write_calls) == (8 * ALIGN, 4)
    assert (first.read_bytes, first.read_calls) == (16 * ALIGN, 8)
    assert first.read_s > 0
    assert first.write_s > 0
    file.write(odd, noise(odd.nbytes)).wait()
    later = file.counts().since(first)
    assert (later.written_bytes, later.write_calls, later.read_bytes) == (2 * ALIGN, 2, 0)


def test_stripes_spread_over_all_paths(folders: list[str]) -> None:
    disk = FailingDisk()
    file = ExtentFile(folders[:2], SMALL, what="test data", calls=disk)
    extent = file.reserve("unit", 8 * ALIGN)
    file.allocate()
    file.write(extent, noise(extent.nbytes)).wait()
    assert sorted(disk.writes) == [(at, 2 * ALIGN) for at in (0, 0, 2 * ALIGN, 2 * ALIGN)]
    file.close()


def test_reads_go_on_while_writes_are_stuck(folders: list[str]) -> None:
    disk = FailingDisk()
    file = ExtentFile(folders[:1], SMALL, what="test data", calls=disk)
    first, second = (file.reserve(f"unit {number}", 64 * ALIGN) for number in range(2))
    file.allocate()
    file.write(first, noise(first.nbytes)).wait()
    disk.hold_writes.clear()
    stuck = file.write(second, noise(second.nbytes))
    file.read(first, noise(first.nbytes)).wait()
    assert not stuck.is_done
    disk.hold_writes.set()
    stuck.wait()
    file.close()


def test_an_extent_is_not_read_before_its_write_has_ended_nor_written_twice(folders: list[str]) -> None:
    disk = FailingDisk()
    file = ExtentFile(folders[:1], SMALL, what="test data", calls=disk)
    extent = file.reserve("unit", ALIGN)
    file.allocate()
    with pytest.raises(AssertionError, match="nothing was written there yet"):
        file.read(extent, noise(ALIGN))
    disk.hold_writes.clear()
    stuck = file.write(extent, noise(ALIGN))
    with pytest.raises(AssertionError, match="it is being written"):
        file.read(extent, noise(ALIGN))
    with pytest.raises(AssertionError, match="under way already"):
        file.write(extent, noise(ALIGN))
    disk.hold_writes.set()
    stuck.wait()
    file.close()


def test_calls_that_move_less_than_asked_are_continued(folders: list[str]) -> None:
    disk = FailingDisk(read=lambda at, nbytes: min(nbytes, ALIGN), write=lambda at, nbytes: min(nbytes, ALIGN))
    file = ExtentFile(folders[:1], SMALL, what="test data", calls=disk)
    extent = file.reserve("unit", 5 * ALIGN)
    file.allocate()
    file.write(extent, noise(extent.nbytes)).wait()
    into = memoryview(huge_buffer(extent.nbytes))
    file.read(extent, into).wait()
    assert into == noise(extent.nbytes)
    assert file.counts().write_calls == 5
    file.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_a_read_that_fails_names_path_extent_and_byte(folders: list[str], number: int) -> None:
    disk = FailingDisk()
    file = ExtentFile(folders[:1], SMALL, what="test data", calls=disk)
    first, extent = file.reserve("unit 0", ALIGN), file.reserve("unit 1", 8 * ALIGN)
    file.allocate()
    for one in (first, extent):
        file.write(one, noise(one.nbytes)).wait()
    disk.on_read = lambda at, nbytes: failure(number) if at == 4 * ALIGN else None
    with pytest.raises(OffloadError) as caught:
        file.read(extent, noise(extent.nbytes)).wait()
    assert str(caught.value) == (
        f"{folders[0]}: unit 1, byte {3 * ALIGN} (byte {4 * ALIGN} of the file) cannot be read: {os.strerror(number)}"
    )
    assert caught.value.hint == "what lies there is lost: see the disk's state, and go on from the last checkpoint"
    file.read(first, noise(ALIGN)).wait()  # what lies elsewhere is not lost
    file.close()


def test_a_file_cut_short_is_an_error_and_never_zeros(folders: list[str]) -> None:
    fds: list[int] = []

    class Disk(FailingDisk):
        def open(self, path: str, flags: int, mode: int) -> int:
            fds.append(super().open(path, flags, mode))
            return fds[-1]

    file = ExtentFile(folders[:1], SMALL, what="test data", calls=Disk())
    extent = file.reserve("unit", 8 * ALIGN)
    file.allocate()
    file.write(extent, noise(extent.nbytes)).wait()
    os.ftruncate(fds[0], 5 * ALIGN)
    with pytest.raises(OffloadError, match=rf"unit, byte {5 * ALIGN} .* cannot be read: the file ends there"):
        file.read(extent, noise(extent.nbytes)).wait()
    file.close()


def test_after_a_failed_write_the_next_read_fails_too(folders: list[str]) -> None:
    disk = FailingDisk()
    file = ExtentFile(folders[:1], SMALL, what="test data", calls=disk)
    extent = file.reserve("unit", 4 * ALIGN)
    file.allocate()
    file.write(extent, noise(extent.nbytes)).wait()
    disk.on_write = lambda at, nbytes: failure(errno.EIO) if at else None
    pending = file.write(extent, noise(extent.nbytes, 1))
    with pytest.raises(OffloadError, match="cannot be written: Input/output error"):
        pending.wait()
    with pytest.raises(OffloadError, match="cannot be written: Input/output error"):
        file.read(extent, noise(extent.nbytes))
    disk.on_write = lambda at, nbytes: None
    file.write(extent, noise(extent.nbytes, 2)).wait()  # written whole, it is good again
    into = memoryview(huge_buffer(extent.nbytes))
    file.read(extent, into).wait()
    assert into == noise(extent.nbytes, 2)
    file.close()


def test_a_disk_that_takes_nothing_is_full(folders: list[str]) -> None:
    file = ExtentFile(folders[:1], SMALL, what="test data", calls=FailingDisk(write=lambda at, nbytes: 0))
    extent = file.reserve("unit", ALIGN)
    file.allocate()
    with pytest.raises(OffloadError, match="cannot be written: No space left on device"):
        file.write(extent, noise(ALIGN)).wait()
    file.close()


def test_a_changed_byte_is_found_by_its_checksum(folders: list[str]) -> None:
    fds: list[int] = []

    class Disk(FailingDisk):
        def open(self, path: str, flags: int, mode: int) -> int:
            fds.append(super().open(path, flags, mode))
            return fds[-1]

    settings = IoSettings(block_bytes=ALIGN, queue_depth=1, verify=True)
    file = ExtentFile(folders[:1], settings, what="test data", calls=Disk())
    extent = file.reserve("unit", 3 * ALIGN)
    file.allocate()
    file.write(extent, noise(extent.nbytes)).wait()
    changed = noise(extent.nbytes)[ALIGN : 2 * ALIGN]
    changed[100] ^= 1
    os.pwritev(fds[0], [changed], ALIGN)
    with pytest.raises(OffloadError) as caught:
        file.read(extent, noise(extent.nbytes)).wait()
    place = re.escape(f"{folders[0]}: unit, byte {ALIGN} (byte {ALIGN} of the file) reads back otherwise than it was")
    assert re.match(place + r" written \(checksum [0-9a-f]{16}, not [0-9a-f]{16}\)$", str(caught.value))
    file.close()


def test_too_little_room_is_told_before_anything_is_laid_down(folders: list[str]) -> None:
    file = ExtentFile(folders[:1], SMALL, what="optimizer states of rank 0", calls=FailingDisk(free=3 << 20))
    file.reserve("unit", 12 << 20)
    with pytest.raises(OffloadError) as caught:
        file.allocate()
    assert str(caught.value) == (
        f"{folders[0]}: optimizer states of rank 0 need 12.0 MiB there; 3.0 MiB are free (No space left on device)"
    )
    assert caught.value.hint == "make room, name another path or several, or keep more in memory"
    file.close()


def test_paths_of_one_file_system_share_its_room(folders: list[str]) -> None:
    file = ExtentFile(folders[:2], SMALL, what="states", calls=FailingDisk(free=9 << 20))
    file.reserve("unit", 12 << 20)
    with pytest.raises(OffloadError, match=r"states need 12.0 MiB there; 9.0 MiB are free"):
        file.allocate()
    file.close()


def test_room_that_is_there_already_is_not_asked_for_again(folders: list[str]) -> None:
    disk = FailingDisk()
    file = ExtentFile(folders[:1], SMALL, what="states", calls=disk)
    file.reserve("unit 0", 1 << 20)
    file.allocate()
    disk.free = 1 << 20
    file.reserve("unit 1", 1 << 20)
    file.allocate()
    file.close()


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError) as caught:
        ExtentFile([str(tmp_path), str(tmp_path / "no")], SMALL, what="states")
    assert str(caught.value) == f"{tmp_path}/no: no file can be made there for states: No such file or directory"
    assert caught.value.hint == "name an existing folder that you may write to"


def test_without_direct_calls_the_page_cache_does_and_is_said_once(
    folders: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = ExtentFile(folders[:1], SMALL, what="states", calls=FailingDisk(refused_flags=os.O_DIRECT))
    extent = file.reserve("unit", ALIGN + 3)
    file.allocate()
    for seed in range(2):
        file.write(extent, noise(extent.nbytes, seed)).wait()
        into = memoryview(bytearray(extent.nbytes))
        file.read(extent, into).wait()
        assert into == noise(extent.nbytes, seed)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{folders[0]}: the file system refuses O_DIRECT, so what is moved goes through the page cache"]
    file.close()


def test_a_file_system_that_takes_the_flag_and_refuses_the_calls_is_found_out(
    folders: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    # The first read is the trial; with the flag gone, the second one is an ordinary one.
    tried: list[int] = []

    def refuse_first(at: int, nbytes: int) -> OSError | None:
        tried.append(at)
        return failure(errno.EINVAL) if len(tried) == 1 else None

    file = ExtentFile(folders[:1], SMALL, what="states", calls=FailingDisk(read=refuse_first))
    extent = file.reserve("unit", ALIGN)
    file.allocate()
    assert len(caplog.records) == 1
    file.write(extent, noise(ALIGN)).wait()
    file.read(extent, memoryview(bytearray(ALIGN))).wait()
    file.close()


def test_other_settings_forget_what_was_written(file: ExtentFile) -> None:
    extent = file.reserve("unit", 4 * ALIGN)
    file.allocate()
    file.write(extent, noise(extent.nbytes)).wait()
    before = file.counts()
    file.retune(IoSettings(block_bytes=2 * ALIGN, single_submit=True))
    with pytest.raises(AssertionError, match="nothing was written there yet"):
        file.read(extent, noise(extent.nbytes))
    file.write(extent, noise(extent.nbytes)).wait()
    later = file.counts().since(before)
    assert (later.written_bytes, later.write_calls) == (4 * ALIGN, 2)


def test_nothing_is_left_of_a_file_that_nobody_closed(folders: list[str]) -> None:
    closed = threading.Event()

    class Disk(FailingDisk):
        def close(self, fd: int) -> None:
            super().close(fd)
            closed.set()

    file = ExtentFile(folders[:1], SMALL, what="states", calls=Disk())
    extent = file.reserve("unit", ALIGN)
    file.allocate()
    file.write(extent, noise(ALIGN)).wait()
    assert os.listdir(folders[0]) == []
    del file
    gc.collect()
    assert closed.wait(DEADLINE_S)


def test_an_extent_begins_where_it_is_asked_to(file: ExtentFile) -> None:
    first, second = file.reserve("a", 1), file.reserve("b", 1, align=8 * ALIGN)
    assert (first.offset, second.offset, file.reserved_bytes) == (0, 8 * ALIGN, 9 * ALIGN)


def test_what_was_written_through_a_mapping_may_be_read_and_is_checked_by_its_new_checksum(folders: list[str]) -> None:
    settings = IoSettings(block_bytes=ALIGN, queue_depth=1, verify=True)
    file = ExtentFile(folders[:1], settings, what="test data")
    extent = file.reserve("unit", 3 * ALIGN)
    file.allocate()
    (fd, stretch), *others = file.layout()
    assert (stretch.start, stretch.at, stretch.nbytes, others) == (0, 0, 3 * ALIGN, [])
    file.note_written(extent)
    into = memoryview(huge_buffer(extent.nbytes))
    file.read(extent, into).wait()
    assert not any(into)
    with mmap.mmap(fd, extent.nbytes) as mapped:
        mapped[:] = noise(extent.nbytes)
        file.note_written(extent, memoryview(mapped).toreadonly())
    file.read(extent, into).wait()
    assert into == noise(extent.nbytes)
    file.note_written(extent, noise(extent.nbytes, 1))
    with pytest.raises(OffloadError, match="reads back otherwise"):
        file.read(extent, into).wait()
    file.close()


def test_files_of_several_paths_are_mapped_stripe_by_stripe(folders: list[str]) -> None:
    file = ExtentFile(folders[:2], SMALL, what="test data")
    file.reserve("unit", 5 * ALIGN)
    file.allocate()
    assert [(stretch.file, stretch.at, stretch.start, stretch.nbytes) for _, stretch in file.layout()] == [
        (0, 0, 0, 2 * ALIGN),
        (1, 0, 2 * ALIGN, 2 * ALIGN),
        (0, 2 * ALIGN, 4 * ALIGN, ALIGN),
    ]
    file.close()
