"""Parameters of which ranks have parts: whole ones put together of all parts, and a part read out of a whole one.

Which part a rank has stands in its unit's layout (`TensorExtent.whole`); what becomes of whole ones, callers decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from math import prod

import torch
from torch import Tensor

from dsrun.checkpoint_files.index.coverage import wrong_cover
from dsrun.checkpoint_files.index.region import Region, TensorBoxes, flat_range

from ...layout.cuts import RankPlacement
from ...layout.unit_layout import TensorExtent
from ...mesh.agree.texts import gather_texts
from ...mesh.collectives import Collectives
from ..units.unit import ParamUnit


class PartsOfRanks:
    """The boxes that other ranks have of this rank's parameters, which they tell each other once.

    Args:
        units: units of the trained parameters; no others are cut.
        over: function that returns the collectives of this rank and those that differ from it on some axes alone.
        device: device of the collectives' tensors.
    """

    def __init__(
        self, units: Sequence[ParamUnit], over: Callable[[Collection[str]], Collectives], *, device: torch.device
    ) -> None:
        self._units = [unit for unit in units if unit.placement.cut_over]
        self._over = over
        self._device = device
        self._boxes: dict[str, list[TensorBoxes]] | None = None

    def exchange(self) -> None:
        """Has each rank know the others' boxes; every rank must call, and the first time enters `gather_texts`."""
        if self._boxes is not None:
            return
        self._boxes = {}
        extents: dict[RankPlacement, list[TensorExtent]] = {}
        for unit in self._units:
            extents.setdefault(unit.placement, []).extend(unit.layout.extents)
        for placement, own in extents.items():
            mine = json.dumps([[[box.offset, box.shape] for box in extent.whole.boxes] for extent in own])
            axis = self._over(placement.cut_over)
            everyone = map(json.loads, gather_texts(mine, axis, device=self._device, label="boxes of parameters"))
            for extent, of_ranks in zip(own, zip(*everyone, strict=True), strict=True):
                self._boxes[extent.name] = [_boxes(extent.whole.shape, found) for found in of_ranks]

    def join(self, unit: ParamUnit, extent: TensorExtent, part: Tensor) -> Tensor:
        """Returns the whole of a parameter, in memory of its own; every rank along the axes that cut it must call.

        Enters one all-gather, in which parts are as long as the longest.

        Args:
            unit: unit of the parameter.
            extent: place of the parameter in it.
            part: this rank's part.
        """
        assert self._boxes is not None, "boxes are exchanged before"
        return joined(part, self._boxes[extent.name], self._over(unit.placement.cut_over), label=f"`{extent.name}`")


def joined(part: Tensor, boxes: Sequence[TensorBoxes], axis: Collectives, *, label: str) -> Tensor:
    """Returns the whole tensor that ranks have parts of; one all-gather, in which parts are as long as the longest.

    Args:
        part: this rank's part.
        boxes: each rank's boxes of the whole; several may have the same.
        axis: ranks that have the parts.
        label: name of the tensor, shown to observers of the wait.
    """
    wrong = wrong_cover(boxes[0].shape, list({box for one in boxes for box in one.boxes}))
    assert wrong is None, f"parts of {label} make no whole: {wrong}"
    longest = max(one.numel for one in boxes)
    mine = part.detach().reshape(-1)
    assert mine.numel() == boxes[axis.rank].numel, "a rank's part has the elements of its boxes"
    gathered = mine.new_empty(axis.size, longest)
    padded = mine if mine.numel() == longest else torch.nn.functional.pad(mine, (0, longest - mine.numel()))
    axis.all_gather(gathered.view(-1), padded, label=label).wait()
    whole = mine.new_empty(boxes[0].shape)
    for of_rank, row in zip(boxes, gathered, strict=True):
        position = 0
        for box in of_rank.boxes:
            whole[box.slices] = row[position : position + box.numel].view(box.shape)
            position += box.numel
    return whole


def read_part(read: Callable[[int, int], Tensor], boxes: TensorBoxes, start: int, stop: int) -> Tensor:
    """Returns the elements [start, stop) of a rank's part, flat, out of the whole tensor.

    Args:
        read: function that gets start and stop, and returns the flat row-major elements [start, stop) of the whole.
        boxes: boxes of the whole that the part is made of.
        start: first element of the part.
        stop: one past the last one.
    """
    pieces = [_read_box(read, boxes.shape, box) for box in boxes.regions(start, stop)]
    return torch.cat(pieces) if pieces else read(0, 0)


def _read_box(read: Callable[[int, int], Tensor], shape: Sequence[int], box: Region) -> Tensor:
    run = flat_range(shape, box)
    if run is not None:
        return read(*run)
    # Whole rows, of which a part is kept: a file is read in one go, and not in a call a row.
    row, first = prod(shape[1:]), box.offset[0]
    rows = read(first * row, (first + box.shape[0]) * row).view(-1, *shape[1:])
    return rows[(slice(None), *box.slices[1:])].reshape(-1)


def _boxes(shape: tuple[int, ...], told: list[list[list[int]]]) -> TensorBoxes:
    return TensorBoxes(shape, tuple(Region(tuple(offset), tuple(lengths)) for offset, lengths in told))
