"""Records come back as they were put away, at the same address, however few may be here at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import ALIGN, IoSettings
from dsrun.errors import OffloadError
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.offload.disk.records import DiskRecords
from support.disks import FailingDisk, failure

SMALL = IoSettings(block_bytes=ALIGN, queue_depth=4)
NUMEL = 5000  # of fp32: 20,000 bytes, which fill no whole number of blocks
COUNT = 5


def records(
    path: Path,
    disk: FailingDisk | None = None,
    *,
    frames: int = 3,
    read_ahead: bool = True,
    write_behind: bool = True,
    verify: bool = False,
    folders: Sequence[str] = (),
) -> DiskRecords:
    settings = IoSettings(block_bytes=ALIGN, queue_depth=4, verify=verify)
    file = ExtentFile(folders or [str(path)], settings, what="states", calls=disk)
    pool = HostPool(None, say=print)
    names = [f"unit {index}" for index in range(COUNT)]
    return DiskRecords(
        file,
        names,
        [[("masters", 4 * NUMEL), ("states", 8 * NUMEL)]] * COUNT,
        frames=frames,
        memory=lambda nbytes: pool.zeros(nbytes, dtype=torch.uint8),
        read_ahead=read_ahead,
        write_behind=write_behind,
    )


@pytest.fixture
def kept(tmp_path: Path) -> DiskRecords:
    return records(tmp_path)


def fill(kept: DiskRecords) -> None:
    for index in range(COUNT):
        kept.bring(index)
        kept.tensor(index, 0, 0, NUMEL, torch.float32).fill_(index + 1)
        kept.tensor(index, 1, 4 * NUMEL, NUMEL, torch.float32).fill_(-index - 1)
        kept.put_away(index)


def check(kept: DiskRecords, index: int) -> None:
    with kept.held(index):
        assert kept.tensor(index, 0, 0, NUMEL, torch.float32).eq(index + 1).all()
        first, second = kept.tensor(index, 1, 0, 2 * NUMEL, torch.float32).split(NUMEL)
        assert first.eq(0).all()
        assert second.eq(-index - 1).all()


@pytest.mark.parametrize("frames", [1, 2, 3, 9])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_records_come_back_as_they_were_put_away(
    tmp_path: Path, frames: int, ahead: bool, behind: bool, verify: bool
) -> None:
    kept = records(tmp_path, frames=frames, read_ahead=ahead, write_behind=behind, verify=verify)
    fill(kept)
    for index in (0, 3, 1, 4, 2, 0, 0):
        kept.expect((index + 1) % COUNT)
        check(kept, index)
    kept.settle()
    assert not any(kept.is_here(index) for index in range(COUNT))


def test_a_tensor_has_one_address_for_life(kept: DiskRecords) -> None:
    tensor = kept.tensor(2, 0, 0, NUMEL, torch.float32)
    fill(kept)
    for index in (2, 0, 2):
        kept.bring(index)
        if index == 2:
            assert tensor.eq(3).all()
        kept.put_away(index, changed=())
    assert tensor.untyped_storage().nbytes() == 4 * NUMEL


def test_what_was_never_written_is_zero_whatever_the_frame_held(kept: DiskRecords) -> None:
    for index in (0, 1, 2):
        kept.bring(index)
        kept.tensor(index, 1, 0, 2 * NUMEL, torch.float32).fill_(7)
        kept.put_away(index, changed=(0,))  # so the second part is never written
    kept.settle()
    for index in range(COUNT):
        with kept.held(index):
            assert kept.tensor(index, 1, 0, 2 * NUMEL, torch.float32).eq(0).all()


def test_only_changed_parts_are_written_and_parts_never_written_not_read(tmp_path: Path) -> None:
    disk = FailingDisk()
    kept = records(tmp_path, disk)
    part, rest = 5 * ALIGN, 10 * ALIGN  # 20,000 and 40,000 bytes in whole blocks
    disk.reads.clear()
    kept.bring(0)
    assert disk.reads == []
    kept.put_away(0, changed=(0,))
    kept.settle()
    assert sum(nbytes for _, nbytes in disk.writes) == part
    with kept.held(0, changed=(1,)):
        pass
    kept.settle()
    assert sum(nbytes for _, nbytes in disk.reads) == part
    assert sum(nbytes for _, nbytes in disk.writes) == part + rest


def test_the_parts_of_a_record_are_one_stretch_of_the_disk(tmp_path: Path) -> None:
    disk = FailingDisk()
    kept = records(tmp_path, disk)
    fill(kept)
    kept.settle()
    disk.reads.clear()
    kept.bring(1)
    stretches = sorted((at, at + nbytes) for at, nbytes in disk.reads)
    assert (stretches[0][0], stretches[-1][1]) == (15 * ALIGN, 30 * ALIGN)
    assert all(end == start for (_, end), (start, _) in pairwise(stretches))


def test_a_write_behind_is_waited_for_by_who_wants_the_record_or_its_frame(tmp_path: Path) -> None:
    disk = FailingDisk()
    kept = records(tmp_path, disk, frames=2)
    fill(kept)
    kept.settle()
    disk.hold_writes.clear()
    kept.bring(0)
    kept.put_away(0)  # returns, though the disk does not
    kept.bring(1)
    disk.hold_writes.set()
    kept.put_away(1)
    check(kept, 0)
    check(kept, 1)


def test_without_write_behind_the_disk_has_it_when_put_away_returns(tmp_path: Path) -> None:
    disk = FailingDisk()
    kept = records(tmp_path, disk, write_behind=False)
    kept.bring(0)
    kept.put_away(0)
    assert not kept.is_here(0)
    assert len(disk.writes) > 0


def test_without_read_ahead_nothing_is_expected(tmp_path: Path) -> None:
    disk = FailingDisk()
    kept = records(tmp_path, disk, read_ahead=False)
    fill(kept)
    kept.settle()
    disk.reads.clear()
    kept.expect(0)
    assert (kept.is_here(0), disk.reads) == (False, [])


def test_all_frames_held_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    kept = records(tmp_path, frames=1)
    kept.bring(0)
    with pytest.raises(AssertionError, match="all frames are held"):
        kept.bring(1)
    with pytest.raises(AssertionError, match="brought once"):
        kept.bring(0)
    kept.put_away(0)
    with pytest.raises(AssertionError, match="was not brought"):
        kept.put_away(0)


@pytest.mark.parametrize("expected", [False, True])
def test_a_read_that_fails_is_told_each_time_and_never_gives_numbers(tmp_path: Path, expected: bool) -> None:
    disk = FailingDisk()
    kept = records(tmp_path, disk)
    fill(kept)
    kept.settle()
    disk.on_read = lambda at, nbytes: failure(errno.EIO) if 15 * ALIGN <= at < 30 * ALIGN else None
    for _ in range(2):
        if expected:
            kept.expect(1)
        with pytest.raises(OffloadError, match=r"masters of unit 1, byte 0 .* cannot be read: Input/output error"):
            kept.bring(1)
        assert not kept.is_here(1)
    check(kept, 0)
    disk.on_read = lambda at, nbytes: None
    check(kept, 1)


@pytest.mark.parametrize("behind", [False, True])
def test_a_write_that_fails_is_told_at_the_next_access(tmp_path: Path, behind: bool) -> None:
    disk = FailingDisk()
    kept = records(tmp_path, disk, write_behind=behind)
    fill(kept)
    kept.settle()
    disk.on_write = lambda at, nbytes: failure(errno.EIO) if 15 * ALIGN <= at < 30 * ALIGN else None
    told = r"masters of unit 1, byte 0 .* cannot be written: Input/output error"
    kept.bring(1)
    if behind:
        kept.put_away(1)
        with pytest.raises(OffloadError, match=told):
            kept.settle()
    else:
        with pytest.raises(OffloadError, match=told):
            kept.put_away(1)
    kept.expect(1)  # what is read ahead tells nobody yet
    for _ in range(2):
        with pytest.raises(OffloadError, match=told):
            kept.bring(1)
    for index in (0, 2, 3, 4):
        check(kept, index)
    kept.settle()


def test_the_disk_is_asked_for_room_before_anything_is_kept(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"states need 300.0 KiB there; 4.0 KiB are free"):
        records(tmp_path, FailingDisk(free=4096))


def test_shown_records_are_read_and_set_in_place(tmp_path: Path) -> None:
    kept = records(tmp_path)
    fill(kept)
    tensors = [kept.tensor(index, 0, 0, NUMEL, torch.float32) for index in range(COUNT)]
    states = kept.tensor(3, 1, 0, 2 * NUMEL, torch.float32)
    for turn in range(2):
        kept.show()
        kept.show()
        assert [float(tensor[0]) for tensor in tensors] == [1, 2, 3 + turn, 4, 5]
        tensors[2][:] = 3 + turn + 1
        assert states[NUMEL:].eq(-4).all()
        kept.hide()
        kept.hide()
        with kept.held(2):
            assert tensors[2].eq(3 + turn + 1).all()
        kept.bring(1)
        tensors[1].fill_(2)
        kept.put_away(1)


def test_values_set_while_shown_survive_a_checksum_and_many_steps(tmp_path: Path) -> None:
    kept = records(tmp_path, verify=True)
    fill(kept)
    master = kept.tensor(1, 0, 0, NUMEL, torch.float32)
    for turn in range(3):
        kept.show()
        master[turn] = 100 + turn
        kept.hide()
        for index in range(COUNT):
            with kept.held(index, changed=(0, 1)):
                pass
    with kept.held(1):
        assert master[:4].tolist() == [100, 101, 102, 2]
    check(kept, 0)


def test_a_part_that_gets_its_first_values_while_shown_is_read_from_then_on(tmp_path: Path) -> None:
    kept = records(tmp_path)
    for index in range(COUNT):
        kept.bring(index)
        kept.put_away(index, changed=(0,))
    kept.show()
    kept.note_written(4, 1)
    states = kept.tensor(4, 1, 0, 2 * NUMEL, torch.float32)
    assert states.eq(0).all()
    states[7] = 1
    kept.hide()
    with kept.held(4):
        assert states.count_nonzero() == 1


def test_a_file_that_was_cut_short_is_not_shown(tmp_path: Path) -> None:
    fds: list[int] = []

    class Disk(FailingDisk):
        def open(self, path: str, flags: int, mode: int) -> int:
            fds.append(super().open(path, flags, mode))
            return fds[-1]

    kept = records(tmp_path, Disk())
    fill(kept)
    kept.settle()
    os.ftruncate(fds[0], 10 * ALIGN)
    with pytest.raises(OffloadError, match=rf"the file of masters of unit 0 and others ends at byte {10 * ALIGN}"):
        kept.show()


def test_records_are_not_brought_while_they_are_shown(kept: DiskRecords) -> None:
    fill(kept)
    kept.show()
    with pytest.raises(AssertionError, match="while they are hidden"):
        kept.bring(0)
    kept.expect(0)  # asks for nothing
    kept.hide()
    check(kept, 0)


@pytest.mark.parametrize("paths", [1, 3])
def test_records_over_several_paths_are_shown_as_they_are(tmp_path: Path, paths: int) -> None:
    folders = [tmp_path / str(number) for number in range(paths)]
    for folder in folders:
        folder.mkdir()
    kept = records(tmp_path, folders=[str(folder) for folder in folders])
    fill(kept)
    kept.show()
    for index in range(COUNT):
        assert kept.tensor(index, 0, 0, NUMEL, torch.float32).eq(index + 1).all()
        assert kept.tensor(index, 1, 4 * NUMEL, NUMEL, torch.float32).eq(-index - 1).all()
    kept.tensor(2, 0, 0, NUMEL, torch.float32).mul_(1)
    kept.hide()
    for index in range(COUNT):
        check(kept, index)


def test_records_as_large_as_huge_pages_move_and_are_shown(tmp_path: Path) -> None:
    file = ExtentFile([str(tmp_path)], IoSettings(), what="states")
    numel = (3 << 20) // 4 + 77
    pool = HostPool(None, say=print)
    kept = DiskRecords(
        file,
        ["a", "b"],
        [[("masters", 4 * numel)]] * 2,
        frames=1,
        memory=lambda nbytes: pool.zeros(nbytes, dtype=torch.uint8),
    )
    tensors = [kept.tensor(index, 0, 0, numel, torch.float32) for index in range(2)]
    for index, tensor in enumerate(tensors):
        kept.bring(index)
        tensor.copy_(torch.arange(numel) + index)
        kept.put_away(index)
    kept.show()
    assert all(torch.equal(tensor, torch.arange(numel).float() + index) for index, tensor in enumerate(tensors))
    kept.hide()
    assert file.reserved_bytes < 2 * 4 * numel + (4 << 20)
