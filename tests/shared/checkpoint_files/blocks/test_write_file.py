"""Pieces and images come to the disk whole, with checksums of their blocks, or leave nothing."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from dsrun.checkpoint_files.blocks.write_file import write_image, write_pieces
from dsrun.checkpoint_files.index.value import BLOCK_BYTES
from dsrun.checkpoint_files.storage.calls import DIRECT_BYTES, FileCalls, WriteError, try_lock
from dsrun.checkpoint_files.storage.places import small_content
from dsrun.checkpoint_files.storage.posix import PosixStorage
from support.checkpoints import sums

SIZES = [1, DIRECT_BYTES, 3 * DIRECT_BYTES + 5, BLOCK_BYTES, 2 * BLOCK_BYTES + 1, 5 * BLOCK_BYTES]


def nothing() -> None:
    """Progress that nobody watches."""


def image_of(nbytes: int) -> tuple[mmap.mmap, bytes]:
    content = (os.urandom(1 << 16) * (nbytes // (1 << 16) + 1))[:nbytes]
    memory = mmap.mmap(-1, -(-nbytes // DIRECT_BYTES) * DIRECT_BYTES)
    memory[:nbytes] = content
    return memory, content


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_image_comes_to_the_disk(tmp_path: Path, nbytes: int) -> None:
    memory, content = image_of(nbytes)
    blocks: list[int] = []
    written = write_image(
        tmp_path / "x", memoryview(memory), nbytes, calls=FileCalls(), progress=lambda: blocks.append(1)
    )
    assert (tmp_path / "x").read_bytes() == content
    assert (written.stored.nbytes, written.stored.sums) == (nbytes, sums(content))
    assert len(blocks) == -(-nbytes // BLOCK_BYTES)
    written.release(remove=False)
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize("cut", [7, 1 << 20, BLOCK_BYTES + 1, 40 << 20])
def test_pieces_of_any_size_make_the_same_file(tmp_path: Path, cut: int) -> None:
    _, content = image_of((34 << 20) + 3 if cut > 7 else 1000)
    pieces = [memoryview(content)[first : first + cut] for first in range(0, len(content), cut)]
    written = write_pieces(tmp_path / "x", pieces, calls=FileCalls(), progress=nothing)
    assert (tmp_path / "x").read_bytes() == content
    assert written.stored.sums == sums(content)
    written.release(remove=True)
    assert not (tmp_path / "x").exists()


class NotDirect(FileCalls):
    """A file system without a way past the page cache."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        if direct:
            raise OSError(22, "Invalid argument")
        return super().create(path)


class FullAfter(FileCalls):
    """A disk with so much room."""

    def __init__(self, nbytes: int) -> None:
        self.room = nbytes

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        if offset + len(data) > self.room:
            raise OSError(28, "No space left on device")
        super().write(descriptor, data, offset)


def test_a_file_system_without_direct_writes_takes_the_image_too(tmp_path: Path) -> None:
    memory, content = image_of(2 * BLOCK_BYTES + 1)
    write_image(tmp_path / "x", memoryview(memory), len(content), calls=NotDirect(), progress=nothing)
    assert (tmp_path / "x").read_bytes() == content


def test_nothing_is_left_of_what_does_not_fit(tmp_path: Path) -> None:
    memory, content = image_of(3 * BLOCK_BYTES)
    full = FullAfter(2 * BLOCK_BYTES)
    said = f"^{tmp_path / 'x'}: cannot be written: No space left on device"
    with pytest.raises(OSError, match=f"{said}; it has 48.0 MiB$"):
        write_image(tmp_path / "x", memoryview(memory), len(content), calls=full, progress=nothing)
    with pytest.raises(OSError, match=f"{said}$"):
        write_pieces(tmp_path / "x", [memoryview(content)], calls=full, progress=nothing)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_or_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("here")
    (tmp_path / "link").symlink_to("nowhere")
    memory, content = image_of(10)
    for name in ("x", "link"):
        with pytest.raises(FileExistsError):
            write_image(tmp_path / name, memoryview(memory), len(content), calls=FileCalls(), progress=nothing)
        with pytest.raises(FileExistsError):
            write_pieces(tmp_path / name, [memoryview(content)], calls=FileCalls(), progress=nothing)
    assert (tmp_path / "x").read_text() == "here"
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_locked_until_its_verdict(tmp_path: Path) -> None:
    written = write_pieces(tmp_path / "x", [memoryview(b"abc")], calls=FileCalls(), progress=nothing)
    descriptor = os.open(tmp_path / "x", os.O_RDWR)
    assert not try_lock(descriptor)
    written.release(remove=False)
    assert try_lock(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("error", [InterruptedError("nobody waits"), BrokenPipeError(errno.EPIPE, "Broken pipe")])
def test_progress_that_raises_ends_the_writing(tmp_path: Path, error: OSError) -> None:
    memory, content = image_of(2 * BLOCK_BYTES)

    def gone() -> None:
        raise error

    with pytest.raises(type(error)):
        write_image(tmp_path / "x", memoryview(memory), len(content), calls=FileCalls(), progress=gone)
    assert not list(tmp_path.iterdir())


class Addresses(FileCalls):
    """Notes where in memory each write is from."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        self.seen[offset] = ctypes.addressof(ctypes.c_char.from_buffer(data))
        super().write(descriptor, data, offset)


@pytest.mark.parametrize("after", [0, 64])
def test_whole_blocks_that_are_aligned_are_written_from_where_they_lie(tmp_path: Path, after: int) -> None:
    memory = memoryview(mmap.mmap(-1, 3 * BLOCK_BYTES + 4096))
    memory[:] = os.urandom(1 << 12) * (len(memory) >> 12)
    piece = memory[after : after + 3 * BLOCK_BYTES - 4096]
    first = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    header, calls = os.urandom(4096), Addresses()
    written = write_pieces(tmp_path / "file", [memoryview(header), piece], calls=calls, progress=lambda: None)
    written.release(remove=False)
    assert (tmp_path / "file").read_bytes() == header + piece
    in_place = [offset for offset, address in calls.seen.items() if address == first + offset - 4096]
    assert sorted(in_place) == ([BLOCK_BYTES, 2 * BLOCK_BYTES] if after == 0 else [])
    assert written.stored.sums == sums(header + bytes(piece))


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("step", ["write", "sync", "cut", "sync_folder"])
@pytest.mark.parametrize("over", [None, "0a0a0a0a"])
def test_a_step_that_fails_names_the_file_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str, over: str | None
) -> None:
    if step == "cut" and over is not None:  # what is replaced is written as it is
        over = None
    calls = FileCalls()

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(calls, step, fail)
    said = f"^{tmp_path / 'index.json'}: cannot be written: {os.strerror(number)}"
    with pytest.raises(WriteError, match=said) as caught:
        PosixStorage(calls).write(tmp_path / "index.json", small_content(b"{}"), over=over)
    assert caught.value.errno == number
    assert (" it has 2 B" in str(caught.value)) == (number == errno.EDQUOT)
