"""The types in which the runtime's features meet. Values and seams only: nothing is done here."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .layout.unit_layout import UnitLayout


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """What one rank updates of one unit; the tensors belong to the unit and live as long as it.

    Attributes:
        layout: the unit's flat buffer.
        start: first element of the range in the flat buffer.
        master: fp32, flat, the range's parameters as the optimizer updates them.
        grad_sum: fp32, flat, the range's gradients, reduced over ranks and summed over micro batches.
        groups: optimizer group of each extent of the layout; extents of one group are neighbours.
    """

    layout: UnitLayout
    start: int
    master: Tensor
    grad_sum: Tensor
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A piece of training state that a checkpoint saves and loads; all a checkpoint knows of any feature.

    Attributes:
        name: qualified name of the tensor it is a piece of.
        role: `param`, `buffer`, or the name of an optimizer state (`exp_avg`).
        shape: of the whole tensor.
        start: first row-major element of the tensor that the piece holds.
        stop: one past the last.
        tensor: flat view of the piece, stop - start elements; loading writes into it.
        replicated: every rank holds the same piece, so one rank saves it and all load it.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor
    replicated: bool
