"""Bytes of a checkpoint's file on their way into tensors: copied or converted.

Which bytes are wanted is decided in `load.py`; they are read, hashed and checked by `checkpoint_files`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsrun.checkpoint_files.blocks.pieces import PIECE_BYTES
from dsrun.checkpoint_files.index.value import BLOCK_BYTES

#: Elements that are converted at once on the CPU: with more, each thread that reads would start threads of its own.
_CONVERTED = 1 << 14


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a file from `first` on are, in `dtype`, the values of `target`: flat, on any device, of any dtype."""

    first: int
    dtype: torch.dtype
    target: Tensor

    @property
    def last(self) -> int:
        return self.first + self.target.numel() * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are the bytes of the target."""
        target = self.target
        return target.device.type == "cpu" and target.dtype == self.dtype and target.is_contiguous()


class ReadInto:
    """Takes the bytes of one file; see `Sink`.

    Args:
        runs: runs to fill, in any order; two runs may want the same bytes.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._at: dict[int, list[_Plain | _Converted]] = {}
        for run in _joined(sorted(runs, key=lambda run: run.first)):
            for number in range(run.first // PIECE_BYTES, -(-run.last // PIECE_BYTES)):
                self._at.setdefault(number, []).append(run)

    @property
    def blocks(self) -> list[int]:
        """The blocks that have any of the bytes, in order."""
        return sorted({number * PIECE_BYTES // BLOCK_BYTES for number in self._at})

    def take(self, first: int, data: memoryview) -> None:
        """See `Sink`."""
        values: Tensor | None = None
        for run in self._at.get(first // PIECE_BYTES, ()):
            if values is None:
                values = torch.frombuffer(data, dtype=torch.uint8)
            begin, end = max(first, run.first), min(first + len(data), run.last)
            run.take(begin, values[begin - first : end - first])


class _Plain:
    """Neighbours in the file that are neighbours in memory too.

    Args:
        first: byte of the file.
        target: flat CPU tensor that the bytes are the values of.
    """

    def __init__(self, first: int, target: Tensor) -> None:
        self._bytes = target.view(torch.uint8)
        self.first, self.last, self.address = first, first + self._bytes.numel(), target.data_ptr()

    def take(self, first: int, data: Tensor) -> None:
        """Copies bytes of the file from `first` on, by one core: torch's copy would start threads from each thread."""
        assert self.first <= first <= first + data.numel() <= self.last, "bytes are those of the run"
        ctypes.memmove(self.address + first - self.first, data.data_ptr(), data.numel())


class _Converted:
    """A run that changes its dtype or device, piece by piece; elements that two pieces share wait for both parts.

    A piece may come again: what came last counts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.first, self.last = run.first, run.last
        self._is_split = run.first % run.dtype.itemsize != 0
        self._lock = threading.Lock()
        self._parts: dict[int, dict[int, Tensor]] = {}  # of elements that two pieces share, by the byte they begin at

    def take(self, first: int, data: Tensor) -> None:
        """Converts bytes of the file from `first` on."""
        itemsize = self._run.dtype.itemsize
        element, into = divmod(first - self.first, itemsize)
        if not self._is_split:
            self._settle(element, data)
            return
        if into:
            self._take_part(element, into, data[: itemsize - into])
            element, data = element + 1, data[itemsize - into :]
        count = data.numel() // itemsize
        if count:
            self._settle(element, data[: count * itemsize].clone())  # a view as the dtype begins at one of its elements
        if data.numel() > count * itemsize:
            self._take_part(element + count, 0, data[count * itemsize :])

    def _take_part(self, element: int, into: int, data: Tensor) -> None:
        with self._lock:
            parts = self._parts.setdefault(element, {})
            parts[into] = data.clone()
            if len(parts) == 2:
                self._settle(element, torch.cat([parts[at] for at in sorted(parts)]))

    def _settle(self, start: int, data: Tensor) -> None:
        values, target = data.view(self._run.dtype), self._run.target
        most = _CONVERTED if target.device.type == "cpu" else values.numel()
        for begin in range(0, values.numel(), most):
            part = values[begin : begin + most]
            target[start + begin : start + begin + part.numel()].copy_(part)


def _joined(runs: Sequence[Run]) -> list[_Plain | _Converted]:
    """Returns runs, sorted by `first`, of which those are one that lie beside each other on both sides."""
    found: list[_Plain | _Converted] = []
    group: list[Run] = []

    def end_group() -> None:
        if group:
            numel = sum(run.target.numel() for run in group)
            found.append(_Plain(group[0].first, group[0].target.as_strided((numel,), (1,))))
            group.clear()

    for run in runs:
        if not run.is_plain:
            found.append(_Converted(run))
            continue
        if group and not _follows(group[-1], run):
            end_group()
        group.append(run)
    end_group()
    return found


def _follows(before: Run, after: Run) -> bool:
    """Whether a run begins where another ends, in the file and in memory."""
    one, other = before.target, after.target
    return (
        before.last == after.first
        and one.dtype == other.dtype
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
    )
