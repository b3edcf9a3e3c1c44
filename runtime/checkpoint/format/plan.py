"""What this rank writes of a checkpoint, and where in its file: pure arithmetic on entries, no values are read.

What several ranks hold is cut into as many runs as they are, so that each of them writes its part, once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dsrun.checkpoint_files.folder.publish import BOXES_KEY
from dsrun.checkpoint_files.index.dtypes import ITEMSIZE
from dsrun.checkpoint_files.tensors.header import header_bytes

from ...protocols import StateEntry
from .tensor_file import dtype_name

#: Data begins at a multiple of it, so that copies into pages and transfers from them are aligned.
_ALIGNED = 4096
#: What several ranks hold is cut at multiples of it: a few small tensors are one rank's.
_SHARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of the tensor of entry `entry` are the bytes of the file from `first` on."""

    entry: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A rank's file.

    Attributes:
        header: header bytes that the file begins with; empty where this rank has nothing to write.
        pieces: pieces that follow the header, without gaps, in this order.
        nbytes: bytes of the whole file; 0 where this rank has nothing to write.
    """

    header: bytes
    pieces: tuple[Piece, ...]
    nbytes: int


class Planner:
    """Plans files, and keeps the last plan: a training run saves the same tensors again and again."""

    def __init__(self) -> None:
        self._asked: object = None
        self._plan: FilePlan | None = None

    def plan(self, entries: Sequence[StateEntry]) -> FilePlan:
        """Returns the plan of this rank's file; see `plan_file`."""
        asked = [(e.name, e.role, e.whole, e.start, e.stop, e.holders, e.tensor.dtype) for e in entries]
        if self._plan is None or asked != self._asked:
            self._plan = plan_file(entries)
            self._asked = asked
        return self._plan


def plan_file(entries: Sequence[StateEntry]) -> FilePlan:
    """Returns what a rank writes.

    Args:
        entries: its pieces; those that repeat over the same ranks are the same on all of these, in the same order.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype.
    """
    runs = [run for over in {_repeats(entry): None for entry in entries} for run in _runs_of(entries, over)]
    # Larger elements first: then every tensor begins at a multiple of its element's size.
    runs.sort(key=lambda run: (-entries[run[0]].tensor.element_size(), run[0]))
    named: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: list[dict[str, object]] = []
    for number, start, stop in runs:
        entry = entries[number]
        for region in entry.whole.regions(entry.start + start, entry.start + stop):
            key = f"{entry.name}:{entry.role}" + "".join(f"@{offset}" for offset in region.offset)
            assert key not in named, f"`{key}` is saved twice"
            named[key] = (dtype_name(entry.tensor, key), region.shape)
            boxes.append(
                {"key": key, "name": entry.name, "role": entry.role, "shape": entry.shape, "offset": region.offset}
            )
    for entry in entries:
        if entry.start == entry.stop and entry.holders.rank == 0:
            # No rank writes any of it, yet it is a part of the model.
            dtype = dtype_name(entry.tensor, f"{entry.name}:{entry.role}")
            boxes.append({"key": None, "name": entry.name, "role": entry.role, "shape": entry.shape, "dtype": dtype})
    if not boxes:
        return FilePlan(b"", (), 0)
    header, spans = header_bytes(named, {"format": "pt", BOXES_KEY: json.dumps(boxes)}, aligned=_ALIGNED)
    pieces: list[Piece] = []
    first = len(header)
    for number, start, stop in runs:
        pieces.append(Piece(number, start, stop, first))
        first += (stop - start) * entries[number].tensor.element_size()
    assert first == max([len(header), *(last for _, last in spans.values())]), "pieces and entries are the same bytes"
    return FilePlan(header, tuple(pieces), first)


def coalesce(plan: FilePlan, entries: Sequence[StateEntry]) -> list[tuple[int, Tensor]]:
    """Returns (first byte, flat values) of the fewest copies that make the data of a file.

    Pieces of a unit lie beside each other in memory as in the file, so thousands of parameters are a few copies.
    """
    return [(first, values) for first, values, _ in coalesce_by_unit(plan, entries, [None] * len(entries))]


def coalesce_by_unit(
    plan: FilePlan, entries: Sequence[StateEntry], units: Sequence[int | None]
) -> list[tuple[int, Tensor, int | None]]:
    """Does what `coalesce` does, and lets only what has the same number into one copy.

    Args:
        plan: plan of the file.
        entries: entries that the plan was made for.
        units: a number for each of them.
    """
    runs: list[tuple[int, Tensor, int | None, int]] = []  # with the elements so far
    for piece in plan.pieces:
        tensor = entries[piece.entry].tensor
        unit = units[piece.entry]
        start, count = tensor.storage_offset() + piece.start, piece.stop - piece.start
        if runs:
            first, before, label, numel = runs[-1]
            if (
                label == unit
                and before.dtype == tensor.dtype
                and before.device == tensor.device
                and before.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                and before.storage_offset() + numel == start
            ):
                runs[-1] = (first, before, unit, numel + count)
                continue
        runs.append((piece.first, tensor.narrow(0, piece.start, count), unit, count))
    return [
        (first, tensor.as_strided((numel,), (1,), tensor.storage_offset()), unit) for first, tensor, unit, numel in runs
    ]


def _repeats(entry: StateEntry) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns which ranks hold an entry: axes, and the pipeline stages where these are some of several."""
    return entry.holders.axes, entry.holders.stages


def _runs_of(
    entries: Sequence[StateEntry], over: tuple[tuple[str, ...], tuple[int, ...]]
) -> list[tuple[int, int, int]]:
    """Returns this rank's runs, as (entry, start, stop), of what repeats over some ranks: all of it where none do."""
    shared = [(n, e) for n, e in enumerate(entries) if _repeats(e) == over and e.stop > e.start]
    if not shared:
        return []
    holders = shared[0][1].holders
    assert all(entry.holders == holders for _, entry in shared), f"a rank has one number among the ranks of {over}"
    total = sum((e.stop - e.start) * _itemsize(e) for _, e in shared)
    share = -(-total // (holders.size * _SHARED_BYTES)) * _SHARED_BYTES
    first, last = holders.rank * share, (holders.rank + 1) * share
    runs: list[tuple[int, int, int]] = []
    position = 0
    for number, entry in shared:
        itemsize, numel = _itemsize(entry), entry.stop - entry.start
        start = min(max(0, -(-(first - position) // itemsize)), numel)
        stop = min(max(0, -(-(last - position) // itemsize)), numel)
        if stop > start:
            runs.append((number, start, stop))
        position += numel * itemsize
    return runs


def _itemsize(entry: StateEntry) -> int:
    return ITEMSIZE[dtype_name(entry.tensor, f"{entry.name}:{entry.role}")]
