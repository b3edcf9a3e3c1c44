"""A file that is put together of memory and of other files has their bytes, and checksums of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.checkpoint_files.blocks.segments import FileSegment
from dsrun.checkpoint_files.blocks.write_file import write_segments
from dsrun.checkpoint_files.index.value import BLOCK_BYTES
from dsrun.checkpoint_files.storage.calls import DIRECT_BYTES, FileCalls
from support.checkpoints import sums


def opened(path: Path, *, direct: bool) -> int:
    return os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))


@pytest.mark.parametrize("direct", [False, True])
def test_parts_of_files_and_of_memory_make_one_file(tmp_path: Path, direct: bool) -> None:
    drive = os.urandom(1 << 20) * 40
    (tmp_path / "drive").write_bytes(drive)
    image = memoryview(os.urandom(DIRECT_BYTES * 3))
    try:
        source = opened(tmp_path / "drive", direct=direct)
    except OSError:
        pytest.skip("this file system knows no direct reads")
    parts = [(0, 5000, False), (12_345, BLOCK_BYTES + 77, True), (5000, 3, False), (1, 1, True), (0, 3 << 20, True)]
    seen: list[int] = []
    written = write_segments(
        tmp_path / "x",
        image,
        [FileSegment(at, nbytes, source if on_drive else None) for at, nbytes, on_drive in parts],
        calls=FileCalls(),
        progress=lambda: seen.append(1),
    )
    expected = b"".join(bytes((drive if on_drive else image)[at : at + n]) for at, n, on_drive in parts)
    assert (tmp_path / "x").read_bytes() == expected
    assert (written.stored.nbytes, written.stored.sums) == (len(expected), sums(expected))
    assert len(seen) == -(-len(expected) // BLOCK_BYTES)
    written.release(remove=False)
    os.close(source)


def test_a_file_that_ends_too_early_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    source = opened(tmp_path / "short", direct=False)
    with pytest.raises(OSError, match=r"/short: the file that .* cannot be read at byte 100: it ends there"):
        write_segments(
            tmp_path / "x", memoryview(b""), [FileSegment(50, 51, source)], calls=FileCalls(), progress=lambda: None
        )
    assert not (tmp_path / "x").exists()
    os.close(source)
