"""Tensors in safetensors files, read by flat ranges: a rank reads the bytes it owns and no others.

Files are one `*.safetensors`, or a folder with `model.safetensors` or `model.safetensors.index.json` and its shards, as
Hugging Face's `save_pretrained` leaves them. What a model does with the values is decided in `pretrained.py`.
Source: the format as its README specifies it: 8 bytes little-endian length, JSON header, data.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from dsrun.errors import CheckpointError, ModelError
from dsrun.files.regular import open_regular, read_regular

from ..partition_parameters import OwnerGroup, ParameterOwner, ZeroParamStatus, unsettle

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100 << 20  # the format's own bound

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `offset` is where its first element stands, in bytes from the start of the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def read(self, start: int, stop: int) -> Tensor:
        """Returns the row-major elements [start, stop), flat, on the CPU.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than before.
        """
        values = torch.empty(stop - start, dtype=self.dtype)
        if start == stop:
            return values
        target = values.view(torch.uint8).numpy().data
        try:
            with os.fdopen(open_regular(self.path), "rb", buffering=0) as file:
                position = self.offset + start * self.dtype.itemsize
                while target:
                    count = os.preadv(file.fileno(), [target[: 1 << 30]], position)
                    if not count:
                        raise OSError("the file has been cut off")
                    position += count
                    target = target[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path}: `{self.name}` cannot be read: {error}") from error
        return values


class StoredHome(ParameterOwner):
    """ParameterOwner of a meta parameter whose values a file holds until `dsrun.initialize` reads them.

    Attributes:
        stored: the tensor in the file.
        param: the parameter.
    """

    def __init__(self, param: nn.Parameter, stored: StoredTensor, *, number: int) -> None:
        self.number = number
        self.name = stored.name
        self.param = param
        self.stored = stored

    @property
    def keeper(self) -> OwnerGroup:
        """See `ParameterOwner`."""
        return _FILES

    def status(self) -> ZeroParamStatus:
        """See `ParameterOwner`."""
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def is_open(self) -> bool:
        """See `ParameterOwner`."""
        return False

    @property
    def is_writable(self) -> bool:
        """See `ParameterOwner`."""
        return False

    def own_piece(self) -> Tensor:
        """See `ParameterOwner`: nothing has been read."""
        return torch.empty(0, dtype=self.param.dtype)

    def keep(self, device: torch.device) -> None:
        """The values have been read: the parameter leaves the meta device, as the same object, without memory."""
        param = self.param
        unsettle(param)
        swap_tensors(param, nn.Parameter(torch.empty(0, device=device), requires_grad=param.requires_grad))


class _Files(OwnerGroup):
    """Whoever asks for values that are still in files is told when they come."""

    @property
    def world_size(self) -> int:
        """See `OwnerGroup`: any rank may be named, for `open` raises."""
        return sys.maxsize

    def open(self, homes: Any, *, writes: bool) -> None:
        """See `OwnerGroup`."""
        raise ModelError(
            f"GatheredParameters: the values of `{homes[0].name}` are still in {homes[0].stored.path}",
            hint="dsrun.initialize reads them: call it first",
        )

    def close(self, homes: Any, *, source: int | None, failed: bool) -> None:
        """See `OwnerGroup`: `open` has raised."""
        raise AssertionError("nothing was opened")


_FILES = _Files()


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors in a file or folder by name; reads headers only.

    Raises:
        CheckpointError: there are no such files, or one is damaged; names every one.
    """
    if path.is_file():
        return read_header(path)
    if (path / _INDEX).is_file():
        return _by_index(path / _INDEX)
    if (path / _SINGLE).is_file():
        return read_header(path / _SINGLE)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) == 1:
        return read_header(files[0])
    found = "no such file or folder" if not path.exists() else f"{len(files)} safetensors files and no {_INDEX}"
    raise CheckpointError(
        f"{path}: {found}",
        hint=f"give a .safetensors file, or a folder with {_SINGLE} or {_INDEX}",
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name.

    Raises:
        CheckpointError: the file cannot be read, or its header does not fit it.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: Mapping[str, Any] = json.loads(file.read(length))
        return {
            name: _entry(path, name, entry, start=8 + length, size=size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: no readable safetensors file: {error}", hint="was it copied or downloaded whole?"
        ) from error


def _entry(path: Path, name: str, entry: Mapping[str, Any], *, start: int, size: int) -> StoredTensor:
    shape = tuple(int(dim) for dim in entry["shape"])
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"`{name}` has the unknown dtype {entry['dtype']}")
    dtype = _DTYPES[entry["dtype"]]
    first, last = entry["data_offsets"]
    if last - first != prod(shape) * dtype.itemsize or first < 0 or start + last > size:
        raise ValueError(f"`{name}` at bytes {first} to {last} does not fit its shape {shape} or the file")
    return StoredTensor(path, name, shape, dtype, start + first)


def _by_index(index: Path) -> dict[str, StoredTensor]:
    try:
        places: Mapping[str, str] = json.loads(read_regular(index))["weight_map"]
        files = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no readable index: {error}") from error
    headers = {file: read_header(index.parent / file) for file in files}
    lost = [name for name, file in places.items() if name not in headers[file]]
    if lost:
        raise CheckpointError(f"{index}: {places[lost[0]]} does not hold `{lost[0]}` ({len(lost)} tensors are missing)")
    return {name: headers[file][name] for name, file in places.items()}
