"""Columns whose weight gradients are computed while the gradient of their input is summed over the ranks.

[Note: weight gradients put off]
Autograd asks a Linear for both gradients at once, and the sum over the ranks can begin only when all columns of one
input have given theirs. So here a column gives the gradient of its input alone, and leaves what that of its weight is
made of. The node in front of all of them, which gets the weights too, begins the sum, computes what was left, and
waits. On one rank's stream the products run beside the sum on the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...mesh.collectives import Collectives


class PutOff:
    """What weight gradients are made of, by number of the weight, between two nodes of one graph."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Tensor, Tensor]] = {}

    def leave(self, number: int, grad: Tensor, x: Tensor) -> None:
        """Leaves the gradient of a product and its input; several of one weight add up."""
        grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if number in self._left:
            before = self._left[number]
            grad, x = torch.cat([before[0], grad]), torch.cat([before[1], x])
        self._left[number] = grad, x

    def take(self, number: int) -> Tensor | None:
        """Returns the gradient of a weight; None where nothing was left."""
        left = self._left.pop(number, None)
        return None if left is None else left[0].t() @ left[1]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives, put_off: PutOff, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.put_off, ctx.count = axis, put_off, len(weights)
        ctx.set_materialize_grads(False)
        return (x.view_as(x), *(weight.view_as(weight) for weight in weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None, *(None for _ in range(ctx.count))
        total = grad.detach().clone(memory_format=torch.contiguous_format)
        pending = ctx.axis.all_reduce(total.view(-1), label="gradient of a cut layer's input")
        of_weights = [ctx.put_off.take(number) for number in range(ctx.count)]
        pending.wait()
        return total, None, None, *of_weights


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff, number: int, trains: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put_off, ctx.number, ctx.trains = put_off, number, trains
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        if ctx.trains:
            ctx.put_off.leave(ctx.number, grad, x)
        bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, None, bias, None, None, None


class OverlappedInput:
    """One input of several columns, see [Note: weight gradients put off].

    Args:
        x: the input; requires a gradient.
        axis: ranks of the tensor axis.
        weights: weights of all columns that may be given it.
    """

    def __init__(self, x: Tensor, axis: Collectives, weights: Sequence[Tensor]) -> None:
        self._put_off = PutOff()
        self._trains = [weight.requires_grad for weight in weights]
        made: Any = _Shared.apply(x, axis, self._put_off, *weights)
        self._x, *self._weights = made

    def column(self, number: int, bias: Tensor | None) -> Tensor:
        """Returns the product with a weight.

        Args:
            number: position of the weight.
            bias: bias of the column; None for none.
        """
        made: Any = _Column.apply(self._x, self._weights[number], bias, self._put_off, number, self._trains[number])
        return made
