"""Where the tensors of a unit lie in its flat buffer, and which part of the buffer each rank owns.

One description serves collectives, the optimizer, memory prediction and checkpoints. Pure arithmetic: no tensors here.

[Note: flat buffers]
A unit's tensors stand one after the other in one flat buffer; rank r of D owns slice r. Two constants fix the places:
- tensors start at multiples of TENSOR_ALIGN elements: a view is then as aligned as a tensor of its own, so kernels
  take the same paths and give the same bits as on a plain model;
- slices are cut at multiples of SHARD_ALIGN elements: block-wise formats (8-bit states), vector loops without tails,
  and norms by fixed blocks come out the same for every D.
Offsets of tensors do not depend on D; only the padding at the end does. Gaps and padding hold zeros and stay zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dsrun.checkpoint_files.index.coverage import wrong_parts
from dsrun.checkpoint_files.index.region import TensorBoxes, uncut
from dsrun.errors import LayoutError

TENSOR_ALIGN = 64
SHARD_ALIGN = 256


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """One tensor's place in the flat buffer.

    Attributes:
        name: qualified name.
        shape: shape of the tensor that stands there: the part that this rank has of a tensor cut over ranks.
        offset: first element in the buffer.
        whole: boxes of the whole tensor that it is; all of that where it is not cut.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    whole: TensorBoxes

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A contiguous part of one tensor inside a range of the flat buffer.

    Attributes:
        extent: the tensor.
        start: first row-major element of the tensor that lies in the range.
        stop: one past the last.
        shard_offset: position of element `start`, counted from the start of the range.
    """

    extent: TensorExtent
    start: int
    stop: int
    shard_offset: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit's flat buffer, see [Note: flat buffers].

    Attributes:
        name: the unit's name.
        extents: its tensors by offset.
        numel: elements from the start to the end of the last tensor, gaps included.
        world_size: ranks the buffer is cut for.
    """

    name: str
    extents: tuple[TensorExtent, ...]
    numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's slice: a multiple of SHARD_ALIGN."""
        return -(-self.numel // (self.world_size * SHARD_ALIGN)) * SHARD_ALIGN

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer."""
        return self.shard_numel * self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Returns [start, stop) of the slice that `rank` owns, in elements of the buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, start: int, stop: int) -> list[ShardPiece]:
        """Returns the parts of tensors that lie in [start, stop) of the buffer, in order of offset."""
        found: list[ShardPiece] = []
        for extent in self.extents:
            first = max(start, extent.offset)
            last = min(stop, extent.offset + extent.numel)
            if first < last:
                found.append(ShardPiece(extent, first - extent.offset, last - extent.offset, first - start))
        return found


def lay_out(
    name: str,
    tensors: Sequence[tuple[str, Sequence[int]]],
    *,
    world_size: int,
    cut: Mapping[str, TensorBoxes] | None = None,
) -> UnitLayout:
    """Places tensors one after the other.

    Args:
        name: the unit's name.
        tensors: (name, shape) in the order they shall stand; shapes may have zero elements.
        world_size: ranks to cut the buffer for.
        cut: boxes of the whole tensors that parts are, by name; the other tensors are whole. None: all are.

    Raises:
        LayoutError: boxes leave the whole tensor, overlap, or have not as many elements as the part.
    """
    extents: list[TensorExtent] = []
    offset = 0
    end = 0
    for tensor_name, shape in tensors:
        boxes = None if cut is None else cut.get(tensor_name)
        if boxes is not None:
            _check_part(tensor_name, shape, boxes)
        extents.append(TensorExtent(tensor_name, tuple(shape), offset, boxes or uncut(shape)))
        end = offset + prod(shape)
        offset = -(-end // TENSOR_ALIGN) * TENSOR_ALIGN
    return UnitLayout(name, tuple(extents), end, world_size)


def _check_part(name: str, shape: Sequence[int], part: TensorBoxes) -> None:
    dims = len(part.shape)
    odd = [
        box for box in part.boxes if (len(box.offset), len(box.shape)) != (dims, dims) or min(box.offset, default=0) < 0
    ]
    if odd:
        wrong = f"the box of {odd[0].shape} at {odd[0].offset} is none of a tensor of {part.shape}"
    else:
        wrong = wrong_parts(part.shape, part.boxes)
    if wrong is None and part.numel != prod(shape):
        wrong = f"its boxes have {part.numel} elements, and its part of shape {tuple(shape)} has {prod(shape)}"
    if wrong is not None:
        raise LayoutError(f"`{name}` is cut wrongly: {wrong}")
