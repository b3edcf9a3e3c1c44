"""Bytes are the same where size and every checksum are; a message names who else has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.checkpoint_files.blocks.write_file import write_pieces
from dsrun.checkpoint_files.index.value import BLOCK_BYTES
from dsrun.checkpoint_files.reference import find_same, frozen_name, is_frozen_name, summed, told_of_others
from dsrun.checkpoint_files.storage.calls import FileCalls


@pytest.mark.parametrize("sizes", [[], [0], [1], [5, 0, 7], [BLOCK_BYTES], [BLOCK_BYTES - 1, 2], [3, BLOCK_BYTES, 9]])
def test_sums_are_those_of_the_file_that_is_written_of_the_same_pieces(tmp_path: Path, sizes: list[int]) -> None:
    pieces = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]
    written = write_pieces(tmp_path / "file", iter(pieces), calls=FileCalls(), progress=lambda: None)
    written.release(remove=False)
    assert summed(iter(pieces)) == written.stored


def test_names_say_which_files_may_be_shared() -> None:
    assert is_frozen_name(frozen_name(3, "00c0ffee"))
    assert is_frozen_name(frozen_name(123456, "00c0ffee"))
    assert not is_frozen_name("rank-00003-00c0ffee.safetensors")


def test_a_folder_without_checkpoints_has_nothing_to_refer_to(tmp_path: Path) -> None:
    stored = summed([memoryview(b"abc")])
    assert find_same(tmp_path, stored) is None
    assert told_of_others(tmp_path / "t" / frozen_name(0, "00c0ffee"), stored) == ""
    assert told_of_others(tmp_path / "t" / "rank-00000-00c0ffee.safetensors", stored) == ""
