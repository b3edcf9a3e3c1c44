"""Bytes of a file come into tensors of any place, dtype and order."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsrun.checkpoint_files.blocks.pieces import PIECE_BYTES
from dsrun.checkpoint_files.blocks.read import BlockReader
from dsrun.checkpoint_files.blocks.write_file import DIRECT_MEMORY_BYTES
from dsrun.checkpoint_files.index.value import Index, StoredFile
from dsrun.checkpoint_files.storage.calls import DIRECT_BYTES
from dsrun.runtime.checkpoint.format.read_into import ReadInto, Run
from support.checkpoints import FILES, sums

NUMEL = 2 * PIECE_BYTES // 4 + 5000


def memory(numel: int, *, after: int = 0) -> Tensor:
    """fp32 memory whose address is `after` bytes behind a page."""
    whole = torch.frombuffer(mmap.mmap(-1, numel * 4 + DIRECT_BYTES), dtype=torch.uint8)
    return whole[after : after + 4 * numel].view(torch.float32)


def poured(folder: Path, content: bytes, runs: Sequence[Run], *, shared: bool = False) -> None:
    (folder / FILES[0]).write_bytes(content)
    index = Index(1, {}, {}, {FILES[0]: StoredFile(len(content), sums(content))})
    pouring = ReadInto(runs)
    assert list(BlockReader(folder, index).pour(FILES[0], pouring.blocks, pouring, shared=shared)) == pouring.blocks


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("after", [0, DIRECT_MEMORY_BYTES, 64, 4])
def test_memory_at_any_address_is_filled_to_its_last_byte_and_no_further(
    tmp_path: Path, after: int, shared: bool
) -> None:
    values = torch.arange(NUMEL, dtype=torch.float32)
    target = memory(NUMEL + 2, after=after)
    target.fill_(-1)
    poured(tmp_path, bytes(4096) + values.numpy().tobytes(), [Run(4096, torch.float32, target[1:-1])], shared=shared)
    assert torch.equal(target[1:-1], values)
    assert target[0] == target[-1] == -1


@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_elements_that_two_pieces_share_are_converted_whole(tmp_path: Path, first: int, dtype: torch.dtype) -> None:
    values = torch.arange(PIECE_BYTES // 8 + 3000, dtype=torch.int64) - 7
    target = torch.zeros(values.numel(), dtype=dtype)
    poured(tmp_path, bytes(first) + values.numpy().tobytes(), [Run(first, torch.int64, target)])
    assert torch.equal(target, values.to(dtype))


def test_bytes_that_two_want_come_to_both(tmp_path: Path) -> None:
    values = torch.arange(NUMEL, dtype=torch.float32)
    one, other = torch.zeros(NUMEL), torch.zeros(NUMEL - 1, dtype=torch.float64)
    poured(tmp_path, values.numpy().tobytes(), [Run(4, torch.float32, other), Run(0, torch.float32, one)])
    assert torch.equal(one, values)
    assert torch.equal(other, values[1:].double())


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("again", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_piece_that_came_wrong_comes_again(first: int, again: int, dtype: torch.dtype) -> None:
    values = torch.arange(PIECE_BYTES // 8 + 3000, dtype=torch.int64) - 7
    content = memoryview(bytearray(bytes(first) + values.numpy().tobytes()))
    pieces = {start: content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)}
    target = torch.zeros(values.numel(), dtype=dtype)
    pouring = ReadInto([Run(first, torch.int64, target)])
    for number, (start, piece) in enumerate(pieces.items()):
        if number == again:
            pouring.take(start, memoryview(bytearray(len(piece))))
        pouring.take(start, piece)
    assert torch.equal(target, values.to(dtype))
