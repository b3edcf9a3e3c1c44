"""C22: what is large costs no more memory than a rank's own state, and is exact behind 4 GiB. A save of 5 GB: soak."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch
from xxhash import xxh3_64_hexdigest

from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import BLOCK_BYTES, Index, StoredBox, StoredFile, StoredTensor
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.checkpoint.save.saver import Saver
from support.entries import entry_of
from support.ranks import run_ranks
from support.savers import nothing, wanted, with_savers
from support.traces import peak_memory_of

_MIB = 1 << 20
STATE_MIB = 96


def test_values_behind_4_gib_of_a_file_are_read_and_named_exactly(tmp_path: Path) -> None:
    blocks = (5 << 30) // BLOCK_BYTES
    number = blocks - 3
    first = number * BLOCK_BYTES + 4096 + 8
    values = torch.arange(1000, dtype=torch.float32)
    block = bytearray(BLOCK_BYTES)
    block[4096 + 8 : 4096 + 8 + 4000] = values.numpy().tobytes()
    path = tmp_path / "rank-00000-0a0a0a0a.safetensors"
    with path.open("wb") as file:
        file.truncate(blocks * BLOCK_BYTES)
        os.pwrite(file.fileno(), block[: 2 * 4096], number * BLOCK_BYTES)
    sums = ["0" * 16] * blocks
    sums[number] = xxh3_64_hexdigest(block)
    box = StoredBox(Region((0,), (1000,)), path.name, first, first + 4000)
    files = {path.name: StoredFile(blocks * BLOCK_BYTES, tuple(sums))}
    index = Index(1, {("w", "param"): StoredTensor((1000,), "F32", [box])}, {}, files)
    found = torch.zeros(1000)
    read(index, tmp_path, [entry_of("w", found)])
    assert torch.equal(found, values)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\1", first + 1)
    with pytest.raises(CheckpointError, match=rf"bytes {number * BLOCK_BYTES} to {(number + 1) * BLOCK_BYTES} are dam"):
        read(index, tmp_path, [entry_of("w", found)])


def _save_much(folder: str, asynchronous: bool) -> list[float]:
    """By how much the peak of this process and of its writer grew in a second save, in MiB."""
    state = torch.rand(STATE_MIB * _MIB // 4)
    entry = entry_of("w", state)

    def body(saver: Saver, rank: int) -> list[float]:
        before = peak_memory_of(os.getpid())
        for tag in ("a", "b"):
            saver.save(Path(folder), tag, lambda: wanted(1.0, rank=0, size=1, entries=[entry]), progress=nothing)
            saver.finish(nothing)
        children = psutil.Process().children()
        peaks = [peak_memory_of(os.getpid()) - before] + [peak_memory_of(child.pid) for child in children]
        return [peak / _MIB for peak in peaks]

    return with_savers(1, body, asynchronous=asynchronous)[0]


def test_a_save_takes_one_copy_of_the_state_and_one_in_training_some_blocks(tmp_path: Path) -> None:
    ((growth, writer),) = run_ranks(1, _save_much, str(tmp_path / "beside"), True)
    assert STATE_MIB <= growth < STATE_MIB + 24
    assert writer < STATE_MIB + 48, "it maps the same memory"
    ((growth,),) = run_ranks(1, _save_much, str(tmp_path / "in"), False)
    assert growth < 4 * BLOCK_BYTES / _MIB + 8
