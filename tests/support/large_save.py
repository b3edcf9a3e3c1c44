"""One save of many GiB in one file, and every byte of it loaded again; for scripts/soak, as a disk takes its time."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.checkpoint.save.saver import Saver
from support.entries import entry_of
from support.savers import nothing, wanted, with_savers
from support.traces import peak_memory_of

_SLICE_NUMEL = 1 << 26


def save_and_load(folder: Path, gib: float) -> str:
    """Saves one tensor of so many GiB in training, checks the file, and loads it slice by slice.

    Args:
        folder: folder for the checkpoint, on a disk with enough room.
        gib: size of the tensor in GiB; the process holds it once.

    Raises:
        AssertionError: a byte is another, or saving and loading took memory for more than some blocks.
    """
    numel = int(gib * (1 << 28))
    state = torch.arange(numel, dtype=torch.int32)
    entry = entry_of("w", state)

    def body(saver: Saver, rank: int) -> None:
        saver.save(folder, "t", lambda: wanted(1.0, rank=0, size=1, entries=[entry]), progress=nothing)

    before = peak_memory_of(os.getpid())
    with_savers(1, body, asynchronous=False)
    index = read_index(folder / "t")
    assert list(verify(folder / "t", index)) == []
    found = torch.empty(_SLICE_NUMEL, dtype=torch.int32)
    for start in range(0, numel, _SLICE_NUMEL):
        stop = min(numel, start + _SLICE_NUMEL)
        read(index, folder / "t", [entry_of("w", found[: stop - start], shape=(numel,), start=start)])
        assert torch.equal(found[: stop - start], state[start:stop]), f"elements {start} to {stop}"
    grown = (peak_memory_of(os.getpid()) - before) / (1 << 20)
    assert grown < 4 * _SLICE_NUMEL / (1 << 20) + 150, f"{grown:.0f} MiB more than the state"
    return f"{gib:g} GiB saved, checked and loaded, with {grown:.0f} MiB beside them"
