"""Blocks are checked before they are seen, and what is damaged is named with its tensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.checkpoint_files.blocks.read import BlockReader
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import BLOCK_BYTES, Index, StoredBox, StoredFile, StoredTensor
from dsrun.errors import CheckpointError
from support.checkpoints import FILES, sums, tensor_file, write_two_files


def large(tag: Path, *, blocks: int) -> tuple[bytes, Index]:
    """A tag of one file, in which each block but the first and the last lies in one tensor."""
    data = os.urandom(1 << 20) * (16 * blocks - 8)
    content = tensor_file({"w": ("U8", [len(data)], data)})
    tag.mkdir()
    (tag / FILES[0]).write_bytes(content)
    start = len(content) - len(data)
    box = StoredBox(Region((0,), (len(data),)), FILES[0], start, len(content))
    tensors = {("w", "param"): StoredTensor((len(data),), "U8", [box])}
    return content, Index(1, tensors, {}, {FILES[0]: StoredFile(len(content), sums(content))})


def test_blocks_come_in_the_order_asked_for(tmp_path: Path) -> None:
    content, index = large(tmp_path / "t", blocks=6)
    reader = BlockReader(tmp_path / "t", index)
    for wanted in ([0, 1, 2, 3, 4, 5], [5, 0, 3], [4], []):
        found: list[int] = []
        for block in reader.blocks(FILES[0], wanted):
            found.append(block.first // BLOCK_BYTES)
            assert block.data == content[block.first : block.first + BLOCK_BYTES]
        assert found == wanted
    assert list(verify(tmp_path / "t", index)) == []


def test_a_flipped_bit_is_named_with_file_and_tensor(tmp_path: Path) -> None:
    index = write_two_files(tmp_path / "t")
    for name in FILES:
        path = tmp_path / "t" / name
        content = path.read_bytes()
        for bit in range(0, 8 * len(content), 5):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            (problem,) = verify(tmp_path / "t", index)
            assert problem.startswith(f"{path}: bytes 0 to {len(content)} are damaged, of the header, param of `w`")
        path.write_bytes(content)
    assert list(verify(tmp_path / "t", index)) == []


def test_a_damaged_block_is_an_error_and_the_others_can_be_read(tmp_path: Path) -> None:
    content, index = large(tmp_path / "t", blocks=3)
    with (tmp_path / "t" / FILES[0]).open("r+b") as file:
        file.seek(BLOCK_BYTES + 7)
        file.write(bytes([content[BLOCK_BYTES + 7] ^ 1]))
    reader = BlockReader(tmp_path / "t", index)
    assert [block.first for block in reader.blocks(FILES[0], [0, 2])] == [0, 2 * BLOCK_BYTES]
    with pytest.raises(CheckpointError, match=r"bytes 16777216 to 33554432 are damaged, of param of `w`"):
        list(reader.blocks(FILES[0], [0, 1, 2]))
    assert len(list(verify(tmp_path / "t", index))) == 1


def test_files_that_are_cut_off_missing_swapped_or_links_are_named(tmp_path: Path) -> None:
    index = write_two_files(tmp_path / "t")
    first, second = (tmp_path / "t" / name for name in FILES)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[0][:-1])
    assert "it has" in next(verify(tmp_path / "t", index))
    first.write_bytes(b"")
    assert "it has 0 bytes, and had" in next(verify(tmp_path / "t", index))
    first.unlink()
    assert "No such file" in next(verify(tmp_path / "t", index))
    first.symlink_to(second)
    assert "cannot be read" in next(verify(tmp_path / "t", index))
    first.unlink()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert len(list(verify(tmp_path / "t", index))) == 2


def test_a_header_that_says_something_else_than_the_index_is_named(tmp_path: Path) -> None:
    index = write_two_files(tmp_path / "t")
    path = tmp_path / "t" / FILES[1]
    content = path.read_bytes().replace(b'"F32"', b'"I32"')
    path.write_bytes(content)
    index.files[FILES[1]] = StoredFile(len(content), sums(content))
    (problem,) = verify(tmp_path / "t", index)
    assert "its header has no param of `w` at bytes" in problem
