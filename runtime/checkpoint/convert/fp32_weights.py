"""The weights of a checkpoint of dsrun's or of DeepSpeed's, whole and in fp32: read one by one, or written as files.

DeepSpeed's files are pickles, and are read by torch's restricted reader: nothing in them is run. What their client
state names is of no use here, and is read as nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsrun.checkpoint_files.folder.find import find_tag
from dsrun.checkpoint_files.folder.removal import held
from dsrun.checkpoint_files.folder.scratch import scratch_folder
from dsrun.checkpoint_files.index.value import ROLES_OF_NO_OPTIMIZER, Index
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.deepspeed_tags import is_deepspeed_tag
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.tensors.header import read_header
from dsrun.errors import CheckpointError
from dsrun.files.atomic import sync_folder, write_atomic

from ..export.model_files import StreamedModel
from ..export.torch_file import to_torch_file
from ..format.load import batches, read_whole
from ..format.tensor_file import dtype_named
from .deepspeed import read_deepspeed

_TORCH = "pytorch_model"
_SAFE = "model"
_ROLES = ("param", "buffer")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter or buffer of a checkpoint, which is read when it is asked for.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of what is read: fp32 for floating point, else as it was stored.
        make: function that returns the values as they were stored.
    """

    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]

    def contiguous(self) -> Tensor:
        """Reads it: a tensor of its own on the CPU."""
        return self.make().to(self.dtype, copy=True)

    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What a checkpoint has of a model.

    Attributes:
        named: buffers, then parameters that are not trained, then those that are.
        aliases: further names of tied parameters to the names in `named`.
        read: function that returns the values of some of them, as they were stored.
    """

    named: dict[str, StoredWeight]
    aliases: dict[str, str]
    read: Callable[[Sequence[str]], dict[str, Tensor]]

    def in_turn(self) -> Generator[tuple[str, Tensor]]:
        """Yields each in its dtype; not more of them are in memory than makes few reads."""
        for batch in batches(list(self.named), [4 * one.numel() for one in self.named.values()]):
            for name, values in self.read(batch).items():
                yield name, values.to(self.named[name].dtype)


def stored_weights(target: Place, *, frozen: bool = True) -> StoredWeights:
    """Returns the weights of a checkpoint; values are read later.

    Args:
        target: the tag's folder.
        frozen: whether parameters that are not trained are wanted.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not say what is trained.
    """
    if isinstance(target, Path) and is_deepspeed_tag(target):
        found = read_deepspeed(target, ignored=None)
        makes = {one.name: one.make for one in found.tensors if one.role in _ROLES}
        shapes = [(one.name, one.role, one.shape, one.dtype) for one in found.tensors if one.role in _ROLES]
        trained = {one.name for one in found.tensors if one.role not in ROLES_OF_NO_OPTIMIZER}
        aliases = found.aliases

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            return {name: makes[name]() for name in names}

    else:
        index = read_index(target)
        roles = {name: role for name, role in index.tensors if role in _ROLES}
        shapes = [
            (name, role, stored.shape, dtype_named(stored.dtype))
            for (name, role), stored in index.tensors.items()
            if role in _ROLES
        ]
        trained, aliases = _trained(index), index.aliases

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for role in _ROLES:
                found |= read_whole(index, target, [name for name in names if roles[name] == role], role=role)
            return {name: found[name] for name in names}

    if not frozen and not trained:
        raise CheckpointError(
            f"{target}: it has no states of the optimizer, by which parameters that are trained are known",
            hint="leave `exclude_frozen_parameters` out, or save with `exclude_frozen_parameters=True`",
        )
    kinds: dict[str, dict[str, StoredWeight]] = {"buffer": {}, "frozen": {}, "trained": {}}
    for name, role, shape, dtype in shapes:
        kind = role if role == "buffer" else "trained" if name in trained else "frozen"
        wanted = torch.float32 if dtype.is_floating_point else dtype
        kinds[kind][name] = StoredWeight(torch.Size(shape), wanted, partial(_single, read, name))
    named = kinds["buffer"] | (kinds["frozen"] if frozen else {}) | kinds["trained"]
    return StoredWeights(named, {alias: name for alias, name in aliases.items() if name in named}, read)


def _single(read: Callable[[Sequence[str]], dict[str, Tensor]], name: str) -> Tensor:
    return read([name])[name]


def _trained(index: Index) -> set[str]:
    """Returns the names of the parameters that are trained: those with states, or that had no gradients."""
    if not index.values.get("frozen", True):
        return {name for name, role in index.tensors if role == "param"}
    roles = index.state_roles()
    left_out: list[dict[str, Any]] = (index.values.get("optimizer") or {}).get("left_out") or []
    return {name for name, role in index.tensors if role in roles} | {n for one in left_out for n in one["names"]}


def write_weights(
    source: Place,
    out: Path,
    *,
    shard_bytes: int | None,
    dtype: torch.dtype = torch.float32,
    as_safetensors: bool = False,
    frozen: bool = True,
    replaces: bool = False,
) -> list[Path]:
    """Writes the parameters and buffers of a checkpoint. Memory is some tensors; the disk has torch's files twice.

    Args:
        source: a tag's folder, or one of tags, whose latest is meant.
        out: folder, made if it is not there.
        shard_bytes: most bytes of tensors in one file, unless a single tensor has more; None: one file.
        dtype: dtype of what has floating point.
        as_safetensors: whether safetensors files are written, and not torch's.
        frozen: whether parameters that are not trained are written.
        replaces: whether a model that `out` holds is replaced, and not refused.

    Returns:
        the files, without their index.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not say what is trained; or `out` holds a model.
        OSError: the file system refuses.
    """
    target = find_tag(source, of_deepspeed=True)
    stem, suffix = (_SAFE, ".safetensors") if as_safetensors else (_TORCH, ".bin")
    there = sorted(out.glob(f"{stem}*{suffix}*"))
    if there and not replaces:
        raise CheckpointError(f"{out}: a model is there already: {there[0].name}", hint="name another folder")
    with held(target):
        weights = stored_weights(target, frozen=frozen)
        if not weights.named:
            raise CheckpointError(f"{target}: it holds no parameters and no buffers")
        for name, one in weights.named.items():
            if one.dtype.is_floating_point:
                weights.named[name] = replace(one, dtype=dtype)
        out.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out, "weights") as between:
            made = _stream(weights, between, shard_bytes)
            if not as_safetensors:
                made = _to_torch(made, weights.aliases, between)
            names = {path.name for path in made} | {path.name for path in between.glob(f"{stem}{suffix}.index.json")}
            for name in names:
                os.replace(between / name, out / name)
            for path in there:
                if path.name not in names:  # a loader would take an old shard or index for one of these
                    path.unlink()
        sync_folder(out)
    return [out / path.name for path in made]


def _stream(weights: StoredWeights, folder: Path, shard_bytes: int | None) -> list[Path]:
    empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in weights.named.items()}
    model = StreamedModel(folder / f"{_SAFE}.safetensors", empty, shard_bytes=shard_bytes, aliases=weights.aliases)
    try:
        for name, values in weights.in_turn():
            model.put(name, values)
    except BaseException:
        model.abandon()
        raise
    model.finish()
    return sorted(folder.glob(f"{_SAFE}*.safetensors"))


def _to_torch(files: Iterable[Path], aliases: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes each safetensors file as a torch file, with an index where there are several."""
    weight_map: dict[str, str] = {}
    nbytes, made = 0, list[Path]()
    for file in files:
        path = folder / f"{_TORCH}{file.stem.removeprefix(_SAFE)}.bin"
        to_torch_file(file, path)
        header = read_header(file)
        file.unlink()
        made.append(path)
        weight_map |= dict.fromkeys(header.entries, path.name)
        nbytes += sum(entry.last - entry.first for entry in header.entries.values())
    weight_map |= {alias: weight_map[name] for alias, name in aliases.items()}
    if len(made) > 1:
        body = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        write_atomic(folder / f"{_TORCH}.bin.index.json", json.dumps(body, indent=2).encode())
    return made
