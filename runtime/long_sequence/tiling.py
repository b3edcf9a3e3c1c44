"""An MLP over tiles of a sequence: what is between its matrices is one tile large, in forward and in backward.

For modules that treat every position alike: what one position gives must depend on that position only.

[Note: tiles]
Forward runs the module over one tile after another and keeps its input alone. Backward runs each tile again, now with
a graph, and goes through that before the next tile begins. The generators are put back once before the first tile, and
tiles come in the order of the forward: so dropout is drawn the same again. Gradients of parameters are added up over
the tiles, in fp32 where parameters have 16 bits, and leave as those of any operation: once, rounded once.

Parameters are gathered by the unit that holds the module, whose backward is under way: once for all tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsrun.errors import ModelError

from ..activation.configured import get_cuda_rng_tracker
from ..activation.recompute.surroundings import Surroundings
from ..second_runs import SecondRun, running_again
from .uncompiled import uncompiled

#: Of the input: positions of a sequence are the last dimension but one.
_POSITIONS = -2


class TiledMLP(nn.Module):
    """A module that runs `tiled`. Its parameters are named `module.*`; call `tiled` where names must stay.

    Args:
        module: treats every position alike; shape [..., L, D] to [..., L, E].
        tile_size: positions at a time; see `tiled`.
    """

    def __init__(self, module: nn.Module, tile_size: int | None = None) -> None:
        super().__init__()
        _check_size(tile_size)
        self.module = module
        self.tile_size = tile_size

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the module returns, of shape [..., L, E]."""
        return tiled(self.module, x, tile_size=self.tile_size)


@uncompiled
def tiled(module: nn.Module, x: Tensor, *, tile_size: int | None = None) -> Tensor:
    """Returns `module(x)`, computed tile by tile and again in backward; see [Note: tiles].

    At ZeRO stage 3 call it in the forward of the block that holds the module. No collectives of its own.

    Args:
        module: treats every position alike, shape [..., L, D] to [..., L, E], one tensor to one tensor.
        x: shape [..., L, D], floating point.
        tile_size: positions at a time; None: D of them, so that a tile is as large as a matrix of the model.

    Returns:
        shape [..., L, E].

    Raises:
        ModelError: `x` has no dimension of positions, or the module returned something of another shape.
    Source: Bekman et al., Arctic Long Sequence Training, 2025, section 3.1.1 (TiledMLP).
    """
    _check_size(tile_size)
    if x.dim() < 2:
        raise ModelError(f"tiled: the input has {x.dim()} dimensions; expected [..., positions, width]")
    size = tile_size or max(1, x.shape[-1])
    params = [param for param in module.parameters() if param.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or params):
        return _run(module, x, size)
    made: Any = _Tiled.apply(module, size, params, x, *params)
    return made


class _Tiled(torch.autograd.Function):
    """All tiles as one node; see [Note: tiles]."""

    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, size: int, wanted: Sequence[nn.Parameter], x: Tensor, *params: Tensor
    ) -> Tensor:
        ctx.surroundings = Surroundings((x,), get_cuda_rng_tracker(), preserve_rng=True)
        ctx.module, ctx.size, ctx.wanted = module, size, wanted
        ctx.save_for_backward(x)
        with running_again(SecondRun(whole=1)):
            return _run(module, x, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        with ctx.surroundings.again():
            grad_x, grads = _gradients(ctx.module, ctx.wanted, x, grad, ctx.size, ctx.needs_input_grad[3])
        return None, None, None, grad_x, *grads


def _run(module: nn.Module, x: Tensor, size: int) -> Tensor:
    """Returns the module's output, a tile at a time into one tensor."""
    outputs: list[Tensor] = []
    whole: Tensor | None = None
    for start, tile in _tiles(x, size):
        output = _called(module, tile)
        if whole is None and not output.requires_grad:
            whole = output.new_empty(*x.shape[:-1], output.shape[-1])
        if whole is None:
            outputs.append(output)
        else:
            whole.narrow(_POSITIONS, start, tile.shape[_POSITIONS]).copy_(output)
    return torch.cat(outputs, dim=_POSITIONS) if whole is None else whole


def _gradients(
    module: nn.Module, params: Sequence[nn.Parameter], x: Tensor, grad: Tensor, size: int, wants_x: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Runs each tile again and through its backward; returns gradients of the input and of parameters."""
    grad_x = torch.empty_like(x) if wants_x else None
    sums: list[Tensor | None] = [None] * len(params)
    several = x.shape[_POSITIONS] > size
    for start, tile in _tiles(x, size):
        length = tile.shape[_POSITIONS]
        leaf = tile.detach().requires_grad_(wants_x)
        with torch.enable_grad():
            output = _called(module, leaf)
        inputs = [leaf, *params] if wants_x else list(params)
        found: Any = torch.autograd.grad(output, inputs, grad.narrow(_POSITIONS, start, length), allow_unused=True)
        of_params: Sequence[Tensor | None] = found[1:] if wants_x else found
        if grad_x is not None:
            of_tile = found[0]
            part = grad_x.narrow(_POSITIONS, start, length)
            part.zero_() if of_tile is None else part.copy_(of_tile)
        _add(sums, of_params, several=several)
    return grad_x, [None if total is None else total.to(param.dtype) for total, param in zip(sums, params, strict=True)]


def _add(sums: list[Tensor | None], found: Sequence[Tensor | None], *, several: bool) -> None:
    """Adds a tile's gradients; sums are fp32 or wider where there are several tiles."""
    for position, value in enumerate(found):
        total = sums[position]
        if value is None:
            continue
        if total is not None:
            total += value
        else:
            sums[position] = value.to(torch.promote_types(value.dtype, torch.float32)) if several else value


def _tiles(x: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (first position, tile); one tile of nothing where there are no positions."""
    positions = x.shape[_POSITIONS]
    for start in range(0, max(1, positions), size):
        yield start, x.narrow(_POSITIONS, start, min(size, positions - start))


def _called(module: nn.Module, tile: Tensor) -> Tensor:
    output: Any = module(tile)
    if not isinstance(output, Tensor) or output.shape[:-1] != tile.shape[:-1]:
        what = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"tiled: {type(module).__name__} made {what} of a tile {list(tile.shape)}",
            hint="expected a tensor of the tile's shape but for its last dimension; run other modules untiled",
        )
    return output


def _check_size(tile_size: int | None) -> None:
    if tile_size is not None and tile_size < 1:
        raise ModelError(f"tiled: tile_size is {tile_size}; expected a number of positions above 0")
