"""Loading: the boxes a rank wants, intersected with the boxes there are. Any number of ranks, any partitioning.

Each rank reads the blocks that hold its elements and no others, each of them once and in the order of the file, checks
them, and copies from there; no rank holds more than its own state and a few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dsrun.checkpoint_files.dtypes import ITEMSIZE
from dsrun.checkpoint_files.index import BLOCK_BYTES, Index, StoredTensor
from dsrun.checkpoint_files.read_blocks import Block, BlockReader
from dsrun.checkpoint_files.region import Region, regions_of_flat_range
from dsrun.errors import CheckpointError, Problem

from ..protocols import StateEntry
from .tensor_file import dtype_named

#: Values that are converted, or go to a device, wait on the CPU until so many bytes of them are together.
_LANDING_BYTES = BLOCK_BYTES


def check_fit(index: Index, folder: Path, wanted: Iterable[tuple[str, str, tuple[int, ...]]], *, strict: bool) -> None:
    """Compares the tensors a model wants with those a checkpoint has, before anything is overwritten.

    Args:
        index: the checkpoint's.
        folder: its tag folder, for messages.
        wanted: (name, role, shape) of every tensor of the model, on whichever rank.
        strict: tensors in the checkpoint that the model does not have are an error too.

    Raises:
        CheckpointError: listing every tensor that is missing, unexpected, or of another shape.
    """
    problems: list[Problem] = []
    expected: set[tuple[str, str]] = set()
    for name, role, shape in wanted:
        expected |= {(name, role), (index.aliases.get(name, name), role)}
        stored = index.find(name, role)
        if stored is None:
            problems.append(Problem(f"{folder}: no {role} of `{name}`, which the model has"))
        elif stored.shape != shape:
            problems.append(Problem(f"{folder}: `{name}` has shape {stored.shape}; the model's has {shape}"))
    if strict:
        problems += [
            Problem(f"{folder}: {role} of `{name}` is not in the model")
            for name, role in index.tensors
            if role in ("param", "buffer") and (name, role) not in expected
        ]
    if problems:
        first = Problem(problems[0].message, "this is a checkpoint of another model; build the model it was saved from")
        raise CheckpointError.of([first, *problems[1:]])


def read(
    index: Index,
    folder: Path,
    entries: Sequence[StateEntry],
    *,
    shared: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Fills each entry's tensor from the checkpoint, converting dtype and device.

    Args:
        index: the checkpoint's.
        folder: its tag folder.
        entries: this rank's pieces, whose names, roles and shapes fit (see `check_fit`).
        shared: other ranks read the same; see `BlockReader`.
        progress: called after each block, so that a slow disk is no hang.

    Raises:
        CheckpointError: a file is missing or damaged; names file and tensors.
    """
    runs: dict[str, list[_Run]] = {}
    for entry in entries:
        stored = index.find(entry.name, entry.role)
        assert stored is not None, f"{entry.role} of `{entry.name}` was compared before"
        for file, run in _runs(entry, stored):
            runs.setdefault(file, []).append(run)
    reader = BlockReader(folder, index, shared=shared)
    for file in sorted(runs):
        ordered = sorted(runs[file], key=lambda run: run.first)
        for block in _scatter(ordered, reader, file):
            del block
            progress()


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of a file from `first` on are, in `dtype`, the values of `target`: flat, on any device, of any dtype."""

    first: int
    dtype: torch.dtype
    target: Tensor

    @property
    def last(self) -> int:
        return self.first + self.target.numel() * self.dtype.itemsize


def _runs(entry: StateEntry, stored: StoredTensor) -> Generator[tuple[str, _Run]]:
    """Yields which bytes of which files an entry's values are."""
    dtype, itemsize = dtype_named(stored.dtype), ITEMSIZE[stored.dtype]
    most = _LANDING_BYTES // itemsize
    position = 0
    for region in regions_of_flat_range(entry.shape, entry.start, entry.stop):
        for box in stored.boxes:
            common = region.intersect(box.region)
            if common is None:
                continue
            inside, outside = common.relative_to(box.region), common.relative_to(region)
            count = _contiguous(common, box.region, region)
            for index in _starts(common, count):
                source = _flat(index, inside.offset, box.region.shape)
                target = position + _flat(index, outside.offset, region.shape)
                for start in range(0, count, most):
                    numel = min(most, count - start)
                    values = entry.tensor.narrow(0, target + start, numel)
                    yield box.file, _Run(box.first + (source + start) * itemsize, dtype, values)
        position += region.numel


def _contiguous(common: Region, box: Region, region: Region) -> int:
    """Returns how many elements of a common box lie beside each other in both boxes it is common to."""
    count = 1
    for dim in reversed(range(len(common.shape))):
        count *= common.shape[dim]
        if not common.shape[dim] == box.shape[dim] == region.shape[dim]:
            break
    return count


def _starts(common: Region, count: int) -> Iterable[tuple[int, ...]]:
    """Returns the first index of each run of `count` elements, in coordinates of the common box."""
    dims = list(common.shape)
    inner = 1
    for dim in reversed(range(len(dims))):
        if inner == count:
            break
        inner *= dims[dim]
        dims[dim] = 1
    return product(*(range(size) for size in dims))


def _flat(index: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the row-major number of an element of a box of `shape`."""
    number = 0
    for dim, size in enumerate(shape):
        number = number * size + index[dim] + offset[dim]
    return number


def _scatter(runs: Sequence[_Run], reader: BlockReader, file: str) -> Generator[Block]:
    """Fills the targets of runs, which are sorted by `first`; yields each block when it has been copied from."""
    numbers = sorted(
        {number for run in runs for number in range(run.first // BLOCK_BYTES, -(-run.last // BLOCK_BYTES))}
    )
    waiting = 0  # the first run that has not begun
    begun: list[tuple[_Run, Tensor]] = []  # with the bytes that its values land in
    for block in reader.blocks(file, numbers):
        end = block.first + len(block.data)
        while waiting < len(runs) and runs[waiting].first < end:
            begun.append((runs[waiting], _landing(runs[waiting])))
            waiting += 1
        data = torch.frombuffer(block.data, dtype=torch.uint8)
        rest: list[tuple[_Run, Tensor]] = []
        for run, landing in begun:
            first, last = max(run.first, block.first), min(run.last, end)
            landing[first - run.first : last - run.first].copy_(data[first - block.first : last - block.first])
            if run.last <= end:
                _settle(run, landing)
            else:
                rest.append((run, landing))
        begun = rest
        yield block
    assert not begun, "a run ends in a block that was read"
    assert waiting == len(runs), "every run begins in a block that was read"


def _landing(run: _Run) -> Tensor:
    """Returns the bytes that a run's values land in: the target's own where they can stay there."""
    target = run.target
    if target.device.type == "cpu" and target.dtype == run.dtype and target.is_contiguous():
        return target.view(torch.uint8)
    return torch.empty(run.last - run.first, dtype=torch.uint8)


def _settle(run: _Run, landing: Tensor) -> None:
    """Brings values that have landed elsewhere to their target."""
    if landing.data_ptr() != run.target.data_ptr():
        run.target.copy_(landing.view(run.dtype))


def read_whole(index: Index, folder: Path, names: Iterable[str], *, role: str) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU, as they were stored.

    Args:
        index: the checkpoint's.
        folder: its tag folder.
        names: of the tensors.
        role: their role.

    Raises:
        CheckpointError: there is none of a name, or a file is damaged.
    """
    entries: list[StateEntry] = []
    for name in names:
        stored = index.find(name, role)
        if stored is None:
            raise CheckpointError(
                f"{folder}: no {role} of `{name}`", hint="the checkpoint is damaged; load another tag"
            )
        values = torch.empty(prod(stored.shape), dtype=dtype_named(stored.dtype))
        entries.append(StateEntry(name, role, stored.shape, 0, values.numel(), values, True))
    read(index, folder, entries)
    return {entry.name: entry.tensor.view(entry.shape) for entry in entries}
