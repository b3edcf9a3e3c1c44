"""Where the elements of a whole tensor lie on disk, as runs that are contiguous there and here. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import product
from math import prod

from ..index.dtypes import ITEMSIZE
from ..index.region import Region
from ..index.value import StoredTensor


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, start + numel) of a tensor in row-major order are the bytes of `file` from `first` on."""

    start: int
    numel: int
    file: str
    first: int


def runs_of(stored: StoredTensor) -> list[Run]:
    """Returns all runs of a tensor in row-major order; together they are the tensor."""
    itemsize = ITEMSIZE[stored.dtype]
    runs = [
        Run(start, numel, box.file, box.first + inside * itemsize)
        for box in stored.boxes
        for start, numel, inside in _rows(stored.shape, box.region)
    ]
    return sorted(runs, key=lambda run: run.start)


def _rows(shape: tuple[int, ...], box: Region) -> Generator[tuple[int, int, int]]:
    """Yields (first element in the tensor, elements, first element in the box) of each run of a box."""
    dim = len(shape)
    while dim > 0 and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    # Of the first dim that is cut, a run has all that the box has of it.
    outer = max(0, dim - 1)
    numel = prod(box.shape[outer:])
    for number, index in enumerate(product(*(range(size) for size in box.shape[:outer]))):
        start = 0
        for d, size in enumerate(shape):
            start = start * size + box.offset[d] + (index[d] if d < outer else 0)
        yield start, numel, number * numel
