"""Runs: consecutive elements of what a rank owns that one leaf of an optimizer updates. Cut here, stepped elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from ...layout.unit_layout import TENSOR_ALIGN, ShardPiece, UnitLayout
from ...protocols import OwnedRange

#: The kind of a tensor, by its name and shape: neighbours of one kind and one group share a leaf.
KindOf = Callable[[str, tuple[int, ...]], str]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive elements of one unit's owned range that are in one optimizer group, and of one kind.

    Attributes:
        owned: the range it is a part of.
        group: number of the optimizer group.
        kind: kind of the run's tensors; empty where the optimizer does not tell kinds apart.
        start: first element in the unit's flat buffer: a multiple of 64, and of 256 where a slice is cut.
        param: leaf over the run's masters as the optimizer sees them.
        grad: view of the run's gradient as the optimizer sees it; the leaf's `.grad`.
    """

    owned: OwnedRange
    group: int
    kind: str
    start: int
    param: nn.Parameter
    grad: Tensor

    @property
    def layout(self) -> UnitLayout:
        """The unit's flat buffer."""
        return self.owned.layout

    @property
    def numel(self) -> int:
        """Elements of the run, gaps between tensors included."""
        return self.param.numel()

    @property
    def first_name(self) -> str:
        """Name of the first tensor that it has elements of; no run has gaps alone."""
        return next(e.name for e in self.layout.extents if e.numel and e.offset + e.numel > self.start)

    def pieces(self) -> list[ShardPiece]:
        """Returns the parts of tensors in the run; `shard_offset` counts from its start."""
        return self.layout.pieces(self.start, self.start + self.numel)


def one_kind(name: str, shape: tuple[int, ...]) -> str:
    """The kind of every tensor, for optimizers that make no difference."""
    return ""


def cut_runs(owned: OwnedRange, kind_of: KindOf = one_kind) -> Iterator[Run]:
    """Cuts an owned range where the optimizer group changes, or the kind of tensor.

    Args:
        owned: the range; extents of one group are neighbours.
        kind_of: function that returns the kind of a tensor by its name and shape; see `KindOf`.
    """
    spans: list[tuple[tuple[int, str], int, int]] = []
    for extent, group in zip(owned.layout.extents, owned.groups, strict=True):
        if not extent.numel:
            continue
        # The gap behind a tensor belongs to its run, so that runs are whole cache lines. Gaps hold zeros.
        end = -(-(extent.offset + extent.numel) // TENSOR_ALIGN) * TENSOR_ALIGN
        key = (group, kind_of(extent.name, extent.shape))
        first = spans.pop()[1] if spans and spans[-1][0] == key else extent.offset
        spans.append((key, first, end))
    for (group, kind), first, last in spans:
        low, high = max(owned.start, first), min(owned.start + owned.master.numel(), last)
        if low < high:
            leaf = nn.Parameter(owned.seen_master.narrow(0, low - owned.start, high - low))
            leaf.grad = grad = owned.seen_grad.narrow(0, low - owned.start, high - low)
            yield Run(owned, group, kind, low, leaf, grad)


def cut_points(run: Run, history_of: Callable[[str], int]) -> list[int]:
    """Returns where in the unit's flat buffer a run has to be cut, so that the tensors of each part share a history.

    Args:
        run: the run.
        history_of: function that returns the number of a tensor's history by its name; see `Histories`.
    """
    points: list[int] = []
    before: int | None = None
    for piece in run.pieces():
        history = history_of(piece.extent.name)
        if before is not None and history != before:
            points.append(run.start + piece.shard_offset)
        before = history
    return points


def cut_run(run: Run, points: Sequence[int]) -> list[Run]:
    """Returns the parts of a run, with leaves and gradients that are views of its own.

    Args:
        run: the run, which is not to be used any more.
        points: first element of each part but the first, as a position in the unit's flat buffer, always the start of a
            tensor.
    """
    parts: list[Run] = []
    for start, stop in pairwise([run.start, *points, run.start + run.numel]):
        first, numel = start - run.start, stop - start
        leaf = nn.Parameter(run.param.data.narrow(0, first, numel))
        grad = run.grad.narrow(0, first, numel)
        leaf.grad = None if run.param.grad is None else grad
        parts.append(Run(run.owned, run.group, run.kind, start, leaf, grad))
    return parts
