"""What differs between two checkpoints: tensors with the largest difference of a value, and values that are no tensor.

Tensors are compared whatever boxes they were stored in: by elements in row-major order. Checksums are not looked at;
`verify` does that.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan, nan
from operator import sub
from typing import Any

from dsrun.errors import CheckpointError

from ..folder.latest import VALUE
from ..index.damage import DamageError
from ..index.dtypes import ITEMSIZE
from ..index.value import Index, StoredTensor
from ..storage.places import OpenedFile, Place, read_range
from ..storage.registry import storage_of
from ..tensors.rounding import convert
from ..tensors.runs import runs_of

#: Elements that are compared at a time.
_CHUNK = 1 << 16
_LETTERS = {
    "BOOL": "B", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same in both.

    Attributes:
        name: name of the tensor.
        role: its role.
        kind: `only in A`, `only in B`, `shape`, `dtype` or `values`.
        detail: both shapes or dtypes; of values empty.
        differing: elements whose bits differ; 0 where values were not compared.
        numel: elements of the tensor.
        largest: the largest absolute difference of two values; nan where one of them is no number, or where the format
            (fp8, complex) is compared by its bits alone.
    """

    name: str
    role: str
    kind: str
    detail: str = ""
    differing: int = 0
    numel: int = 0
    largest: float = nan


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value of the index, by its dotted path, as both have it; `absent` where one has none."""

    path: str
    first: Any
    second: Any


class _Absent:
    def __repr__(self) -> str:
        return "(none)"


absent = _Absent()


def value_differences(first: Any, second: Any, path: str = "") -> Generator[ValueDifference]:
    """Yields what differs between two JSON values, object by object.

    Args:
        first: JSON value from the first checkpoint.
        second: JSON value from the second checkpoint.
        path: path of keys that leads to both values, e.g. `optimizer.groups[0]`; empty at the top.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            inner = f"{path}.{key}" if path else str(key)
            yield from value_differences(first.get(key, absent), second.get(key, absent), inner)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from value_differences(one, other, f"{path}[{number}]")
    elif type(first) is not type(second) or (first != second and not _are_nan(first, second)):
        yield ValueDifference(path, first, second)


def tensor_differences(
    first: tuple[Place, Index],
    second: tuple[Place, Index],
    *,
    progress: Callable[[str], None] = lambda name: None,
) -> Generator[TensorDifference]:
    """Yields every tensor that differs, in the first one's order; those that only the second has come last.

    Args:
        first: folder and index of the one.
        second: folder and index of the second checkpoint.
        progress: callback that gets the name of each tensor before it is read.

    Raises:
        CheckpointError: a file cannot be read.
    """
    tensors, others = first[1].tensors, second[1].tensors
    with _Files() as files:
        for (name, role), stored in tensors.items():
            other = others.get((name, role))
            if other is None:
                yield TensorDifference(name, role, "only in A")
            elif stored.shape != other.shape:
                yield TensorDifference(name, role, "shape", f"{list(stored.shape)} and {list(other.shape)}")
            elif stored.dtype != other.dtype:
                yield TensorDifference(name, role, "dtype", f"{stored.dtype} and {other.dtype}")
            else:
                progress(name)
                found = _values(stored, files.chunks(first[0], stored), files.chunks(second[0], other))
                if found is not None:
                    differing, numel, largest = found
                    yield TensorDifference(name, role, "values", "", differing, numel, largest)
    for name, role in others:
        if (name, role) not in tensors:
            yield TensorDifference(name, role, "only in B")


def _values(stored: StoredTensor, first: Generator[bytes], second: Generator[bytes]) -> tuple[int, int, float] | None:
    """Returns how many elements differ, of how many, and by how much at most; None where none does."""
    size = ITEMSIZE[stored.dtype]
    differing = numel = 0
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        numel += len(a) // size
        if a == b:
            continue
        differing += sum(map(bytes.__ne__, _cut(a, size), _cut(b, size)))
        largest = _larger(largest, _largest(a, b, stored.dtype))
    return (differing, numel, largest) if differing else None


def _cut(data: bytes, size: int) -> list[bytes]:
    return [one for (one,) in struct.iter_unpack(f"{size}s", data)]


def _largest(a: bytes, b: bytes, dtype: str) -> float:
    differences = [abs(value) for value in map(sub, _numbers(a, dtype), _numbers(b, dtype))]
    if not differences or any(isnan(value) for value in differences):
        # Infinities of one sign differ by nothing; what is no number differs by no number.
        same = [x == y for x, y in zip(_numbers(a, dtype), _numbers(b, dtype), strict=True)]
        differences = [0.0 if equal else value for value, equal in zip(differences, same, strict=True)]
    return nan if not differences or any(isnan(value) for value in differences) else float(max(differences))


def _numbers(data: bytes, dtype: str) -> Any:
    if dtype in ("F32", "BF16", "F16"):
        return array("f", bytes(convert(memoryview(data), dtype, "F32")))
    if dtype == "F64":
        return array("d", data)
    return array(_LETTERS[dtype], data) if dtype in _LETTERS else []


def _larger(one: float, other: float) -> float:
    return nan if isnan(one) or isnan(other) else max(one, other)


def _are_nan(first: Any, second: Any) -> bool:
    return isinstance(first, float) and isinstance(second, float) and isnan(first) and isnan(second)


class _Files:
    """Files that are read from, opened once."""

    def __init__(self) -> None:
        self._open: dict[Place, OpenedFile] = {}
        self._closing = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def chunks(self, folder: Place, stored: StoredTensor) -> Generator[bytes]:
        """Yields a tensor's bytes in row-major order, by chunks that are the same for every cut of it."""
        size = ITEMSIZE[stored.dtype]
        parts = bytearray()
        for run in runs_of(stored):
            done = 0
            while done < run.numel:
                count = min(_CHUNK - len(parts) // size, run.numel - done)
                parts += self._read(folder / run.file, run.first + done * size, count * size)
                done += count
                if len(parts) == _CHUNK * size:
                    yield bytes(parts)
                    parts.clear()
        if parts:
            yield bytes(parts)

    def _read(self, path: Place, first: int, nbytes: int) -> bytes:
        try:
            if path not in self._open:
                self._open[path] = self._closing.enter_context(storage_of(path).read(path))
            return read_range(self._open[path], first, nbytes)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        except DamageError as error:
            raise CheckpointError(f"{path}: {error}", hint="see `dsrun checkpoint verify`") from error


def comparable(index: Index) -> Mapping[str, Any]:
    """Returns what `value_differences` compares of a checkpoint: everything but its tensors and files."""
    values = {name: value for name, value in index.values.items() if name != VALUE}  # which differs in any two
    return {"world_size": index.world_size, **values, "aliases": index.aliases}
