"""A checkpoint's weights as safetensors files for other programs: one, or shards with an index.

Bytes go from the blocks that are read, and checked, straight to their place in the files: memory is some blocks,
whatever the model's size. Names and index are those that Hugging Face's loaders look for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from dsrun.errors import CheckpointError
from dsrun.files.atomic import sync_folder, write_atomic
from dsrun.units import format_bytes

from ..blocks.read import BlockReader
from ..index.dtypes import ITEMSIZE
from ..index.value import BLOCK_BYTES, Index
from ..storage.calls import FileCalls, naming
from ..storage.places import Place
from ..tensors.header import header_bytes
from ..tensors.rounding import FLOATS, convert
from ..tensors.runs import Run, runs_of

FILE = "model.safetensors"
_INDEX = f"{FILE}.index.json"
#: Elements that are converted and written at a time.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is exported.

    Attributes:
        name: name of the tensor in the exported files.
        role: role under which the checkpoint stores the tensor: `param` or `buffer`.
        source: format that it is stored in.
        target: format that it gets.
        shape: shape of the whole tensor.
    """

    name: str
    role: str
    source: str
    target: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of the exported tensor."""
        return prod(self.shape) * ITEMSIZE[self.target]


def weights_of(index: Index, *, dtype: str | None) -> list[Weight]:
    """Returns the parameters and buffers of a checkpoint; of tied ones the name that they are stored under.

    Args:
        index: the checkpoint's.
        dtype: format of the exported floating-point parameters, "F32" or "BF16"; None to keep the stored one. Buffers
            keep theirs.
    """
    weights: list[Weight] = []
    for (name, role), stored in index.tensors.items():
        if role in ("param", "buffer"):
            converted = dtype is not None and role == "param" and stored.dtype in FLOATS
            weights.append(
                Weight(name, role, stored.dtype, dtype if converted and dtype else stored.dtype, stored.shape)
            )
    return weights


def cut_shards(weights: Sequence[Weight], shard_bytes: int | None) -> list[list[Weight]]:
    """Returns the weights of each file, in order; at least one file.

    Args:
        weights: all of them.
        shard_bytes: largest number of tensor bytes in one file, unless one tensor alone has more; None for a single
            file.
    """
    shards: list[list[Weight]] = [[]]
    for weight in weights:
        held = sum(other.nbytes for other in shards[-1])
        if shard_bytes is not None and shards[-1] and held + weight.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(weight)
    return shards


def export(
    folder: Place,
    index: Index,
    out: Path,
    *,
    dtype: str | None,
    shard_bytes: int | None,
    calls: FileCalls,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Writes the weights of a checkpoint to `out`, which gets its names when all is there.

    Args:
        folder: the tag's.
        index: its index.
        out: folder, made if it is not there; it must hold no exported model.
        dtype: format of the exported floating-point parameters, "F32" or "BF16"; None to keep the stored one. See
            `weights_of`.
        shard_bytes: largest number of tensor bytes in one file; None for a single file. See `cut_shards`.
        calls: the file system.
        progress: callback that gets the name of each file of the checkpoint before it is read.

    Returns:
        the files, without their index.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, `out` holds a model, or has no room; nothing is left.
        OSError: the file system refuses; likewise.
    """
    weights = weights_of(index, dtype=dtype)
    if not weights:
        raise CheckpointError(f"{folder}: it holds no parameters and no buffers")
    shards = cut_shards(weights, shard_bytes)
    names = [_file_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    calls.make_folder(out)
    _check_room(out, sum(weight.nbytes for weight in weights))
    files: list[_File] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            files.append(_File(out / f".{name}.{os.getpid()}", shard, _metadata(index, shard), calls))
        _scatter(folder, index, files, progress)
        for file in files:
            with naming(file.path):
                calls.sync(file.descriptor)
        for file, name in zip(files, names, strict=True):
            calls.rename(file.path, out / name)
    except BaseException:
        for file in files:
            calls.remove(file.path)
        raise
    finally:
        for file in files:
            os.close(file.descriptor)
    if len(shards) > 1:
        body = {
            "metadata": {"total_size": sum(weight.nbytes for weight in weights)},
            "weight_map": {w.name: name for name, shard in zip(names, shards, strict=True) for w in shard},
        }
        write_atomic(out / _INDEX, json.dumps(body, indent=2).encode())
    sync_folder(out)
    return [out / name for name in names]


def _file_name(number: int, count: int) -> str:
    stem, suffix = FILE.split(".")
    return FILE if count == 1 else f"{stem}-{number:05}-of-{count:05}.{suffix}"


def _metadata(index: Index, shard: Sequence[Weight]) -> dict[str, str]:
    """Returns a file's free part: a further name of a tied weight leads to the stored one, as safetensors' loader reads
    it; transformers' asks for `format` alone, and ties by the model's config."""
    here = {weight.name for weight in shard}
    return {**{alias: name for alias, name in index.aliases.items() if name in here}, "format": "pt"}


def _check_room(out: Path, nbytes: int) -> None:
    found = sorted(path.name for path in out.glob("model*.safetensors")) + [p.name for p in out.glob(_INDEX)]
    if found:
        raise CheckpointError(f"{out}: a model is there already: {found[0]}", hint="name another folder, or empty it")
    disk = os.statvfs(out)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        raise CheckpointError(
            f"{out}: the weights have {format_bytes(nbytes)}, and {format_bytes(free)} are free there",
            hint="name a folder on a larger disk",
        )


@dataclass(slots=True)
class _File:
    """An exported file under way."""

    path: Path
    weights: Sequence[Weight]
    metadata: Mapping[str, str]
    calls: FileCalls
    descriptor: int = field(init=False)
    #: First byte of each weight, by stored name and role.
    places: dict[tuple[str, str], int] = field(init=False)

    def __post_init__(self) -> None:
        named = {weight.name: (weight.target, weight.shape) for weight in self.weights}
        text, spans = header_bytes(named, self.metadata)
        self.places = {(weight.name, weight.role): spans[weight.name][0] for weight in self.weights}
        self.descriptor = self.calls.create(self.path)
        try:
            with naming(self.path):
                self.calls.write(self.descriptor, memoryview(text), 0)
        except OSError:
            os.close(self.descriptor)
            self.calls.remove(self.path)
            raise


@dataclass(slots=True)
class _Pouring:
    """A run on its way: bytes come in order, and elements that a block's end cuts wait for the next."""

    run: Run
    weight: Weight
    file: _File
    done: int = 0
    rest: bytes = b""

    @property
    def last(self) -> int:
        return self.run.first + self.run.numel * ITEMSIZE[self.weight.source]

    def take(self, data: memoryview) -> None:
        size, wide = ITEMSIZE[self.weight.source], ITEMSIZE[self.weight.target]
        if self.rest:
            missing = size - len(self.rest)
            self._write(memoryview(self.rest + data[:missing]), wide)
            data, self.rest = data[missing:], b""
        whole = len(data) // size * size
        for first in range(0, whole, _CHUNK * size):
            self._write(data[first : min(first + _CHUNK * size, whole)], wide)
        self.rest = bytes(data[whole:])

    def _write(self, data: memoryview, wide: int) -> None:
        values = memoryview(convert(data, self.weight.source, self.weight.target))
        place = self.file.places[self.weight.name, self.weight.role] + (self.run.start + self.done) * wide
        with naming(self.file.path):
            self.file.calls.write(self.file.descriptor, values, place)
        self.done += len(values) // wide


def _scatter(folder: Place, index: Index, files: Sequence[_File], progress: Callable[[str], None]) -> None:
    """Reads every block that holds weights, once and in the order of its file, and writes what is in it."""
    runs: dict[str, list[_Pouring]] = {}
    for file in files:
        for weight in file.weights:
            for run in runs_of(index.tensors[weight.name, weight.role]):
                runs.setdefault(run.file, []).append(_Pouring(run, weight, file))
    reader = BlockReader(folder, index)
    for name in sorted(runs):
        progress(name)
        waiting = sorted(runs[name], key=lambda one: one.run.first, reverse=True)
        numbers = {n for one in waiting for n in range(one.run.first // BLOCK_BYTES, -(-one.last // BLOCK_BYTES))}
        begun: list[_Pouring] = []
        for block in reader.blocks(name, sorted(numbers)):
            end = block.first + len(block.data)
            while waiting and waiting[-1].run.first < end:
                begun.append(waiting.pop())
            for one in begun:
                first, last = max(one.run.first, block.first), min(one.last, end)
                one.take(block.data[first - block.first : last - block.first])
            begun = [one for one in begun if one.last > end]
