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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsrun.errors import ModelError

from ....kept_results import kept_result
from ....mesh.collectives import Collectives, own_slice
from ..part_randomness import PartRandomness

#: Dim of the sequence in hidden states, [..., sequence, width].
_DIM = -2


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives) -> Tensor:
        ctx.axis = axis
        return _own(x, axis).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all(grad, ctx.axis, label="gradient of slices of the sequence"), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives, adds: bool) -> Tensor:
        ctx.axis, ctx.adds = axis, adds
        return kept_result(lambda: _all(x, axis, label="slices of the sequence"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mine = (
            _sum_of_own(grad, ctx.axis, label="gradient of a cut layer's input") if ctx.adds else _own(grad, ctx.axis)
        )
        return mine.clone(memory_format=torch.contiguous_format), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Collectives) -> Tensor:
        ctx.axis = axis
        return kept_result(lambda: _sum_of_own(x, axis, label="outputs of a cut layer"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all(grad, ctx.axis, label="gradient of a cut layer's outputs"), None


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


def scatter_sums(x_BSD: Tensor, axis: Collectives) -> Tensor:
    """Returns this rank's slice of the sum of all ranks' outputs; one reduce-scatter, and an all-gather in backward."""
    made: Any = _Scattered.apply(x_BSD, axis)
    return made


def _own(x: Tensor, axis: Collectives) -> Tensor:
    length = x.shape[_DIM] // axis.size
    return x.detach().narrow(_DIM, axis.rank * length, length)


def _all(x: Tensor, axis: Collectives, *, label: str) -> Tensor:
    mine = x.detach().contiguous()
    slices = mine.new_empty((axis.size, *mine.shape))
    axis.all_gather(slices.view(-1), mine.view(-1), label=label).wait()
    return torch.cat(list(slices), _DIM)


def _sum_of_own(x: Tensor, axis: Collectives, *, label: str) -> Tensor:
    parts = torch.stack(x.detach().chunk(axis.size, _DIM))
    axis.reduce_scatter(parts.view(-1), label=label).wait()
    mine = own_slice(parts.view(-1), rank=axis.rank, size=axis.size)
    return mine.view(parts.shape[1:]).clone()


@dataclass(slots=True)
class SlicedBlock:
    """What a block of a stack knows of the slices.

    Attributes:
        axis: ranks of the tensor axis.
        splits: whether it is given whole sequences, and takes its slice of them: the first block of a stack.
        joins: whether it returns whole sequences: the last one.
        randomness: random numbers of its slices; None: it draws none.
    """

    axis: Collectives
    splits: bool
    joins: bool
    randomness: PartRandomness | None = None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a block on slices.

        Args:
            forward: the block's own forward.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        if self.splits:
            args, kwargs = with_hidden(args, kwargs, lambda x: split_sequence(x, self.axis))
        if self.randomness is None:
            output = forward(*args, **kwargs)
        else:
            self.randomness.enter()
            try:
                output = forward(*args, **kwargs)
            finally:
                self.randomness.leave()
        return _with_hidden_output(output, lambda x: join_sequence(x, self.axis)) if self.joins else output

    def __deepcopy__(self, memo: object) -> SlicedBlock:
        """Returns the same for a copy; ranks are no part of a model."""
        return SlicedBlock(self.axis, self.splits, self.joins, self.randomness)


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments with its hidden states changed: the first floating tensor, by position or by name."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name in ("hidden_states", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            return args, {**kwargs, name: change(value)}
    raise ModelError(
        "tensor_parallel.sequence_parallel: a block is given no hidden states",
        hint="leave `tensor_parallel.sequence_parallel` out for this model",
    )


def _with_hidden_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    changed, _ = with_hidden(tuple(output), {}, change)
    return changed
