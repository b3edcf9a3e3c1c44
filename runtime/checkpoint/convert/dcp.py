"""Checkpoints of torch.distributed.checkpoint: a model's and an optimizer's state dicts, by name. Writes nothing.

`.metadata`, a pickle, says which boxes of which tensors lie where in the `.distcp` files, each a torch file of its own
in the midst of others. The paths of the dicts that were saved tell a model's entries from an optimizer's.
Source: torch 2.13, torch/distributed/checkpoint/{metadata,filesystem}.py.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import CheckpointError
from dsrun.files.regular import open_regular

from .foreign import ForeignCheckpoint, FoundTensor, json_or_none, options_of
from .pickles import Inert, PlainUnpickler, read_torch_bytes

METADATA = ".metadata"
_MODEL = ("model", "module", "state_dict")
_OPTIMIZER = ("optim", "optimizer", "optimizers")
_STEPS = ("step", "steps", "global_step", "global_steps")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_KNOWN = frozenset(
    {
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
    }
)
_DATA = {**_DTYPES, "torch.Size": tuple, "collections.OrderedDict": OrderedDict}


@dataclass(frozen=True, slots=True)
class _Item:
    """Bytes of a file that are a torch file."""

    path: Path
    offset: int
    length: int
    ignored: Collection[str]

    def read(self) -> Any:
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                file.seek(self.offset)
                data = file.read(self.length)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
        return read_torch_bytes(data, self.path, ignored=self.ignored)


def read_dcp(folder: Path, *, ignored: Collection[str], buffers: Collection[str]) -> ForeignCheckpoint:
    """Returns what a checkpoint of torch.distributed.checkpoint holds.

    Args:
        folder: folder of the checkpoint; it holds the file `.metadata`.
        ignored: names in the checkpoint's pickles that are read as inert placeholders instead of being refused.
        buffers: names of the tensors that are buffers; the files do not tell buffers from parameters.

    Raises:
        CheckpointError: it is damaged, or names what is not known.
    """
    path = folder / METADATA
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            metadata = PlainUnpickler(file, path, known=_KNOWN | set(ignored), data=_DATA).load()
        return _found(folder, metadata, ignored, buffers)
    except CheckpointError:
        raise
    except (OSError, pickle.UnpicklingError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: it is not as torch.distributed.checkpoint saves it: {type(error).__name__}: {error}"
        ) from error


def _found(folder: Path, metadata: Inert, ignored: Collection[str], buffers: Collection[str]) -> ForeignCheckpoint:
    found = ForeignCheckpoint([], f"torch.distributed.checkpoint, {folder}")
    items = {
        (index["fqn"], None if index.value("offset") is None else tuple(index["offset"])): _item(folder, info, ignored)
        for index, info in metadata["storage_data"].items()
    }
    paths: dict[str, tuple[Any, ...]] = metadata.value("planner_data") or {}
    groups: dict[str, dict[str, Any]] = {}
    model: list[FoundTensor] = []
    for key, stored in metadata["state_dict_metadata"].items():
        kind, name = _place(paths.get(key, (key,)))
        chunks = stored.value("chunks")
        if chunks is None:
            _take_value(found, groups, kind, name, items[key, None].read())
            continue
        tensor = _tensor(key, stored, items)
        if kind == "optimizer":
            _take_state(found, name, tensor)
        else:
            model.append(_renamed(tensor, name, "param"))
    trained = {one.name for one in found.tensors}
    _take_model(found, model, trained, buffers)
    _take_groups(found, groups)
    _take_steps(found)
    if trained:
        roles = {one.role for one in found.tensors}
        decoupled = all(group.get("decoupled_weight_decay", True) for group in found.groups)
        found.optimizer = None if "exp_avg_sq" not in roles else "AdamW" if decoupled else "Adam"
    return found


def _item(folder: Path, info: Inert, ignored: Collection[str]) -> _Item:
    name = info["relative_path"]
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{folder / METADATA}: it names the file {name!r}, which is not in its folder")
    if info.value("transform_descriptors"):
        raise CheckpointError(f"{folder / METADATA}: {name} is compressed, which is not imported")
    return _Item(folder / name, int(info["offset"]), int(info["length"]), ignored)


def _place(path: tuple[Any, ...]) -> tuple[str, str]:
    """Returns whose entry a path of the saved dicts is, and its name there."""
    for depth, step in enumerate(path[:2]):
        rest = ".".join(map(str, path[depth + 1 :]))
        if step in _MODEL and rest:
            return "model", rest
        if step in _OPTIMIZER and rest:
            return "optimizer", rest
    return "other", ".".join(map(str, path))


def _tensor(key: str, stored: Inert, items: dict[tuple[str, Any], _Item]) -> FoundTensor:
    shape = tuple(stored["size"])
    properties = stored["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    boxes = [(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in stored["chunks"]]
    parts = [(offset, sizes, items[key, offset]) for offset, sizes in boxes]
    return FoundTensor(key, "", shape, dtype, partial(_whole, shape, dtype, parts))


def _whole(
    shape: tuple[int, ...], dtype: torch.dtype, parts: list[tuple[tuple[int, ...], tuple[int, ...], _Item]]
) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for offset, sizes, item in parts:
        value = item.read()
        if not isinstance(value, Tensor) or tuple(value.shape) != sizes or value.dtype != dtype:
            raise CheckpointError(f"{item.path}: no {dtype} of shape {sizes} at byte {item.offset}")
        whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] = value
    return whole


def _renamed(tensor: FoundTensor, name: str, role: str) -> FoundTensor:
    return FoundTensor(name, role, tensor.shape, tensor.dtype, tensor.make)


def _take_state(found: ForeignCheckpoint, name: str, tensor: FoundTensor) -> None:
    body = name.removeprefix("state.")
    owner, _, role = body.rpartition(".")
    if body == name or not owner:
        found.left.append(f"optimizer: {name}")
        return
    found.tensors.append(_renamed(tensor, owner, role if tensor.shape else f"scalar:{role}"))


def _take_value(found: ForeignCheckpoint, groups: dict[str, dict[str, Any]], kind: str, name: str, value: Any) -> None:
    if kind == "optimizer" and name.startswith("param_groups."):
        group, _, option = name.removeprefix("param_groups.").rpartition(".")
        groups.setdefault(group, {})[option] = value
        return
    is_json, taken = json_or_none(value)
    if kind == "other" and is_json:
        found.client_state[name] = taken
    else:
        found.left.append(f"{name}: a {type(value).__name__}")


def _take_model(
    found: ForeignCheckpoint, model: list[FoundTensor], trained: set[str], buffers: Collection[str]
) -> None:
    """Adds parameters and buffers; one that no optimizer has, and that equals one it has, is tied to that."""
    with_state = [one for one in model if one.name in trained]
    for one in model:
        twin = None
        if trained and one.name not in trained:
            alike = [other for other in with_state if (other.shape, other.dtype) == (one.shape, one.dtype)]
            twin = next((other for other in alike if torch.equal(other.make(), one.make())), None)
        if twin is not None and len(one.shape) > 1:
            found.aliases[one.name] = twin.name
            continue
        is_buffer = one.name in buffers or one.name.rpartition(".")[2] in _BUFFERS or not one.dtype.is_floating_point
        found.tensors.append(_renamed(one, one.name, "buffer" if is_buffer else "param"))


def _take_groups(found: ForeignCheckpoint, groups: dict[str, dict[str, Any]]) -> None:
    options = [options_of(group) for group in groups.values()]
    if all(key.isdecimal() for key in groups):
        found.groups = [options_of(groups[key]) for key in sorted(groups, key=int)]
    elif all(one == options[0] for one in options):
        found.groups = options[:1]
    else:
        found.left.append("options of the optimizer's groups: they are saved by parameter, and differ")


def _take_steps(found: ForeignCheckpoint) -> None:
    """Takes the count of steps from what the script saved, or from the optimizer."""
    for name, value in found.client_state.items():
        if name.rpartition(".")[2] in _STEPS and type(value) is int:
            found.counters["global_steps"] = value
            return
    step = next((one for one in found.tensors if one.role == "scalar:step"), None)
    if step is not None:
        found.counters["global_steps"] = int(step.make())
