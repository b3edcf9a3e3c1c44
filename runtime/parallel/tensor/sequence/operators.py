"""Megatron's sequence parallelism: between cut layers each rank has a slice of the sequence, so norms and dropout too.

[Note: slices of the sequence]
A stack's first block takes its slice of the hidden states, and the last one puts them together again. Inside, a module
with columns gathers its input, and a row gives each rank the sum of its slice alone: a reduce-scatter in place of an
all-reduce, and an all-gather before the next columns. Together these move as many bytes. Weights that work on slices
(norms, biases of rows) see a part of the tokens, so their gradients are summed over the ranks.
Source: Reducing Activation Recomputation in Large Transformer Models (Korthikanti et al., 2022), section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsrun.errors import ModelError

from ....kept_results import kept_result, kept_without_product
from ....mesh.collectives import Collectives
from ...hidden_states import hidden_of, value_at, with_value

#: Dim of the sequence in hidden states, [..., sequence, width].
_DIM = -2


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives) -> Tensor:
        ctx.axis = axis
        return _own(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all(grad, ctx.axis, label="gradient of slices of the sequence"), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives, adds: bool) -> Tensor:
        ctx.axis, ctx.adds = axis, adds
        # A recomputed call gathers again: what it would keep is the whole sequence, of which slices are to hold a part.
        return _all(x, axis, label="slices of the sequence")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.adds:
            return _sum_of_own(grad, ctx.axis, label="gradient of a cut layer's input"), None, None
        return _own(grad, ctx.axis), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives, is_own: bool) -> Tensor:
        ctx.axis = axis

        def summed() -> Tensor:
            return _sum_of_own(x, axis, label="outputs of a cut layer")

        # A whole sequence of partial sums is not needed again once the slice of their sum is kept.
        return kept_without_product(x, summed) if is_own else kept_result(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all(grad, ctx.axis, label="gradient of a cut layer's outputs"), None, None


def split_sequence(x_BSD: Tensor, axis: Collectives) -> Tensor:
    """Returns this rank's slice of the sequence; backward enters an all-gather.

    Args:
        x_BSD: hidden states, shape [..., S, D], the same on all ranks; S divides by their number.
        axis: ranks of the tensor axis.

    Raises:
        ModelError: S does not divide.
    """
    if x_BSD.dim() < 2 or x_BSD.shape[_DIM] % axis.size:
        raise ModelError(
            f"tensor_parallel.sequence_parallel: hidden states have shape {tuple(x_BSD.shape)}; the sequence, dim "
            f"{_DIM}, does not divide by {axis.size} ranks",
            hint=f"pad sequences to a multiple of {axis.size} (`pad_to_multiple_of` of transformers' collators)",
        )
    made: Any = _Split.apply(x_BSD, axis)
    return made


def join_sequence(x_BSD: Tensor, axis: Collectives) -> Tensor:
    """Returns the whole sequence, for what all ranks compute alike; one all-gather, and none in backward."""
    made: Any = _Joined.apply(x_BSD, axis, False)
    return made


def gather_for_columns(x_BSD: Tensor, axis: Collectives) -> Tensor:
    """Returns the whole sequence, for columns alone; one all-gather, and a reduce-scatter in backward."""
    made: Any = _Joined.apply(x_BSD, axis, True)
    return made


def scatter_sums(x_BSD: Tensor, axis: Collectives, *, is_own: bool = False) -> Tensor:
    """Returns this rank's slice of the sum of all ranks' outputs; one reduce-scatter, and an all-gather in backward.

    Args:
        x_BSD: this rank's outputs of the whole sequence.
        axis: ranks of the tensor axis.
        is_own: whether nobody else has the memory of the outputs, so that a recomputed call need not keep it.
    """
    made: Any = _Scattered.apply(x_BSD, axis, is_own)
    return made


def _own(x: Tensor, axis: Collectives) -> Tensor:
    length = x.shape[_DIM] // axis.size
    return x.detach().narrow(_DIM, axis.rank * length, length).clone(memory_format=torch.contiguous_format)


def _all(x: Tensor, axis: Collectives, *, label: str) -> Tensor:
    mine = x.detach().contiguous()
    slices = mine.new_empty((axis.size, *mine.shape))
    axis.all_gather(slices.view(-1), mine.view(-1), label=label).wait()
    return torch.cat(list(slices), _DIM)


def _sum_of_own(x: Tensor, axis: Collectives, *, label: str) -> Tensor:
    parts = torch.stack(x.detach().chunk(axis.size, _DIM))
    axis.reduce_scatter(parts.view(-1), label=label).wait()
    return parts[axis.rank].clone()  # or all ranks' parts would live as long as it


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments with its hidden states changed, see `hidden_states.py`.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        change: function of the hidden states.

    Raises:
        ModelError: no argument is a floating tensor.
    """
    place = hidden_of(args, kwargs)
    if place is None:
        raise ModelError(
            "tensor_parallel.sequence_parallel: a block is given no hidden states",
            hint="leave `tensor_parallel.sequence_parallel` out for this model",
        )
    return with_value(place, change(value_at(place, args, kwargs)), args, kwargs)
