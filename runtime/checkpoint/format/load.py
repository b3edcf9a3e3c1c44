"""Loading: the boxes a rank wants, intersected with the boxes there are. Any number of ranks, any partitioning.

Each rank reads the blocks that hold its elements and no others, each of them once, by way of a few pieces beside its
tensors; no rank holds more than its own state. How bytes become values: `read_into.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dsrun.checkpoint_files.blocks.read import BlockReader
from dsrun.checkpoint_files.blocks.shared import SharedBlocks
from dsrun.checkpoint_files.index.dtypes import ITEMSIZE
from dsrun.checkpoint_files.index.region import Region, uncut
from dsrun.checkpoint_files.index.value import BLOCK_BYTES, Index, StoredTensor
from dsrun.checkpoint_files.storage.places import Place
from dsrun.errors import CheckpointError, Problem

from ...protocols import SOLE_HOLDER, StateEntry
from .read_into import ReadInto, Run
from .tensor_file import dtype_named

#: A run has not more bytes.
_RUN_BYTES = BLOCK_BYTES
#: Bytes of whole tensors that are read in one go.
_TOGETHER = 512 << 20
#: Who wants less of a file's blocks than this part shares them with other ranks.
_ALONE = 0.75


def check_fit(
    index: Index,
    folder: Place,
    wanted: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    strict: bool,
    elsewhere: Iterable[tuple[str, str]] = (),
) -> None:
    """Compares the tensors a model wants with those a checkpoint has, before anything is overwritten.

    Args:
        index: the checkpoint's.
        folder: its tag folder, for messages.
        wanted: (name, role, shape) of every tensor of the model, on whichever rank.
        strict: tensors in the checkpoint that the model does not have are an error too.
        elsewhere: (name, role) of tensors that the model has on ranks of other pipeline stages, which look for them.

    Raises:
        CheckpointError: listing every tensor that is missing, unexpected, or of another shape.
    """
    problems: list[Problem] = []
    expected = {pair for name, role in elsewhere for pair in ((name, role), (index.aliases.get(name, name), role))}
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
    folder: Place,
    entries: Sequence[StateEntry],
    *,
    others: bool = False,
    sharing: SharedBlocks | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Fills each entry's tensor from the checkpoint, converting dtype and device.

    Args:
        index: the checkpoint's.
        folder: its tag folder.
        entries: pieces that this rank wants; their names, roles and shapes fit the checkpoint (see `check_fit`).
        others: other ranks load it at the same time: what they read as well comes by way of the page cache, once.
        sharing: shared memory for blocks that ranks of this host also read, in place of the page cache; None for no
            sharing.
        progress: callback after each block that is read, so that a slow disk does not count as a hang.

    Raises:
        CheckpointError: a file is missing or damaged; names file and tensors. Tensors may have some of the new values.
    """
    runs: dict[str, list[Run]] = {}
    alone: dict[str, int] = {}
    for entry in entries:
        stored = index.find(entry.name, entry.role)
        if stored is None or stored.shape != entry.shape:  # else compared before: a copy in memory is of one host
            raise CheckpointError(
                f"{folder}: no {entry.role} of `{entry.name}` of shape {entry.shape}",
                hint="this is a state of another model; build the model it was saved from",
            )
        for file, run in _runs(entry, stored):
            runs.setdefault(file, []).append(run)
            alone[file] = alone.get(file, 0) + (0 if entry.holders.size > 1 else run.last - run.first)
    _end_what_reads(entries)
    reader = BlockReader(folder, index, sharing=sharing)
    pourings = {file: ReadInto(runs[file]) for file in sorted(runs)}
    try:
        if sharing is not None:
            checked = [file for file in pourings if index.files[file].sums is not None]
            sharing.begin({file: pourings[file].blocks for file in checked})
        for file, pouring in pourings.items():
            by_cache = others and (sharing is None or index.files[file].sums is None)
            shared = by_cache and alone[file] < _ALONE * BLOCK_BYTES * len(pouring.blocks)
            for _ in reader.pour(file, pouring.blocks, pouring, shared=shared):
                progress()
    finally:
        if sharing is not None:
            sharing.end()
    # Bytes were written behind torch's back: what autograd may have kept of these tensors is no more.
    increment_version([entry.tensor for entry in entries])


def _end_what_reads(entries: Sequence[StateEntry]) -> None:
    """Returns when the current streams have done what they were given.

    Threads copy to devices on streams of their own, which know of no stream that a script computes on.
    """
    for device in {entry.tensor.device for entry in entries if entry.tensor.device.type not in ("cpu", "meta")}:
        torch.get_device_module(device).current_stream(device).synchronize()


def _runs(entry: StateEntry, stored: StoredTensor) -> Generator[tuple[str, Run]]:
    """Yields which bytes of which files an entry's values are."""
    dtype, itemsize = dtype_named(stored.dtype), ITEMSIZE[stored.dtype]
    most = _RUN_BYTES // itemsize
    position = 0
    for region in entry.whole.regions(entry.start, entry.stop):
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
                    yield box.file, Run(box.first + (source + start) * itemsize, dtype, values)
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


def batches(names: Sequence[str], nbytes: Sequence[int]) -> Generator[list[str]]:
    """Yields names of tensors in the order they are given, as many together as are worth reading in one go.

    Blocks of a file that several tensors lie in are then read once, and memory is bounded but for one tensor.

    Args:
        names: names of the tensors.
        nbytes: bytes of each of them.
    """
    batch: list[str] = []
    room = _TOGETHER
    for name, size in zip(names, nbytes, strict=True):
        if batch and size > room:
            yield batch
            batch, room = [], _TOGETHER
        batch.append(name)
        room -= size
    if batch:
        yield batch


def read_whole(index: Index, folder: Place, names: Iterable[str], *, role: str) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU, as they were stored.

    Args:
        index: the checkpoint's.
        folder: its tag folder.
        names: names of the tensors.
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
        entries.append(StateEntry(name, role, uncut(stored.shape), 0, values.numel(), values, SOLE_HOLDER))
    read(index, folder, entries)
    return {entry.name: entry.tensor.view(entry.shape) for entry in entries}
