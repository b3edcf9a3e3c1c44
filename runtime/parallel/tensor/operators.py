"""The five operators between activations that ranks hold whole and activations of which each holds a part.

Each knows its own backward. They work on plain tensors of any strides, take no tensor over but where they are told to,
and give contiguous ones.
All ranks of the axis call the same operators in one order, forward and backward: autograd's order is equal on them.
Source: Megatron-LM (Shoeybi et al., 2019), section 3: f and g; and their counterparts that gather and split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kept_results import kept_result
from ...mesh.collectives import Collectives
from .styles import EVEN, Deal

#: Name of what rows sum, shown to observers of the wait.
_OUTPUTS = "outputs of a cut layer"


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return summed(grad, ctx.axis, label="gradient of a cut layer's input"), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives) -> Tensor:
        return kept_result(lambda: summed(x, axis, label=_OUTPUTS))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives, whole: int, deal: Deal) -> Tensor:
        ctx.axis, ctx.deal = axis, deal
        return kept_result(lambda: joined(x, axis, whole=whole, deal=deal))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return part_of(grad, ctx.axis, deal=ctx.deal), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives, deal: Deal) -> Tensor:
        ctx.axis, ctx.deal, ctx.whole = axis, deal, x.shape[-1]
        return part_of(x, axis, deal=deal)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return joined(grad, ctx.axis, whole=ctx.whole, deal=ctx.deal), None, None


def share_input(x: Tensor, axis: Collectives) -> Tensor:
    """Returns `x`, which every rank has whole, for modules of which each rank has a part.

    Backward enters an all-reduce: each rank's part gives a part of the gradient.

    Args:
        x: floating point, of any shape; the same on all ranks of the axis.
        axis: ranks of the tensor axis.
    """
    made: Any = _Shared.apply(x, axis)
    return made


def sum_outputs(x: Tensor, axis: Collectives, *, in_place: bool = False) -> Tensor:
    """Returns the sum of `x` over the ranks, on each of them; enters an all-reduce, and none in backward.

    Args:
        x: floating point, of any shape; each rank's part of the sum.
        axis: ranks of the tensor axis.
        in_place: whether `x` becomes the sum, which saves a copy and a node of the graph. For a product that nobody
            else has: what autograd has kept of it would be another value, and is refused in backward.
    """
    if in_place and x.is_contiguous():
        # Its gradient is the sum's as well, so to the graph nothing happens.
        own = x.detach()
        total = kept_result(lambda: _sum_into(own, axis))
        if total is not own:
            own.copy_(total)
        return x
    made: Any = _Summed.apply(x, axis)
    return made


def gather_last(x: Tensor, axis: Collectives, *, whole: int, deal: Deal = EVEN) -> Tensor:
    """Returns the tensor that ranks hold parts of along its last dim; enters an all-gather, and none in backward.

    What follows is computed alike on all ranks, so each rank's part of the gradient is there.

    Args:
        x: this rank's part.
        axis: ranks of the tensor axis.
        whole: length of the last dim of the whole.
        deal: the parts of the whole.
    """
    made: Any = _Gathered.apply(x, axis, whole, deal)
    return made


def split_last(x: Tensor, axis: Collectives, *, deal: Deal = EVEN) -> Tensor:
    """Returns this rank's part of the last dim of `x`, which all have whole; backward enters an all-gather.

    Args:
        x: floating point; the same on all ranks of the axis.
        axis: ranks of the tensor axis.
        deal: the parts of the whole.
    """
    made: Any = _Split.apply(x, axis, deal)
    return made


def summed(x: Tensor, axis: Collectives, *, label: str) -> Tensor:
    """Returns the sum of `x` over the ranks, in memory of its own; one all-reduce, outside of autograd.

    Args:
        x: tensor of any strides, left as it is.
        axis: ranks of the tensor axis.
        label: name of what is summed, shown to observers of the wait.
    """
    return _sum_into(x.detach().clone(memory_format=torch.contiguous_format), axis, label=label)


def part_of(x: Tensor, axis: Collectives, *, deal: Deal = EVEN) -> Tensor:
    """Returns this rank's part of the last dim, in memory of its own; no collective."""
    found = runs_of(deal, x.shape[-1], axis)
    pieces = [x.detach()[..., start:stop] for start, stop in found] or [x.detach()[..., :0]]
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def joined(
    x: Tensor, axis: Collectives, *, whole: int, deal: Deal = EVEN, label: str = "parts of a cut layer"
) -> Tensor:
    """Returns the whole of which ranks have parts along the last dim; one all-gather, outside of autograd.

    Parts of unlike length are padded to the longest for the way.

    Args:
        x: this rank's part.
        axis: ranks of the tensor axis.
        whole: length of the last dim of the whole.
        deal: the parts of the whole.
        label: name of what is gathered, shown to observers of the wait.
    """
    places = [deal.runs(whole, rank=rank, size=axis.size) for rank in range(axis.size)]
    lengths = [sum(stop - start for start, stop in found) for found in places]
    assert x.shape[-1] == lengths[axis.rank], f"a part of {x.shape[-1]}, where rank {axis.rank} has {lengths}"
    longest = max(lengths)
    mine = x.detach()
    if lengths[axis.rank] < longest:
        mine = torch.nn.functional.pad(mine, (0, longest - lengths[axis.rank]))
    gathered = mine.new_empty((axis.size, *mine.shape))
    axis.all_gather(gathered.view(-1), mine.contiguous().view(-1), label=label).wait()
    if deal.parts == 1 and min(lengths) == longest:
        return torch.cat(list(gathered), -1)
    total = x.new_empty((*x.shape[:-1], whole))
    for part, found in zip(gathered, places, strict=True):
        position = 0
        for start, stop in found:
            total[..., start:stop] = part[..., position : position + stop - start]
            position += stop - start
    return total


def _sum_into(total: Tensor, axis: Collectives, *, label: str = _OUTPUTS) -> Tensor:
    axis.all_reduce(total.view(-1), label=label).wait()
    return total


def runs_of(deal: Deal, numel: int, axis: Collectives) -> list[tuple[int, int]]:
    """Returns the runs [start, stop) of a dim that this rank has."""
    return deal.runs(numel, rank=axis.rank, size=axis.size)
