"""Reversible blocks: backward makes a block's input from its output, so a stack keeps the output of its last block.

[Note: the coupling]
A block of two functions F and G maps (x1, x2) to y1 = x1 + F(x2), y2 = x2 + G(y1). So x2 = y2 - G(y1) and
x1 = y1 - F(x2): nothing of the block is kept. The sums are rounded: with unit roundoff u (2**-24 in fp32), an input
comes back with an error of at most u (|y| + |x|) for its sum and its difference, plus what an error of x2 does in F.
Errors add up over blocks. In bf16 that is too much for deep stacks: keep the two streams in fp32 (`autocast` inside F
and G works).
Source: Gomez et al., The Reversible Residual Network, 2017, equations 6 to 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...second_runs import SecondRun, running_again
from .rng import RngState, RngTracker, capture, replayed

_Pair = tuple[Tensor, Tensor]


class Reversible(nn.Module):
    """One block of the coupling, see [Note: the coupling].

    Args:
        f: maps a tensor to one of the same shape.
        g: another one.
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x1: Tensor, x2: Tensor) -> _Pair:
        """Returns (y1, y2); as an ordinary block, which keeps what any block keeps."""
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)

    def invert(self, y1: Tensor, y2: Tensor) -> _Pair:
        """Returns the inputs that gave these outputs, up to rounding."""
        x2 = y2 - self.g(y1)
        return y1 - self.f(x2), x2


class ReversibleStack(nn.Module):
    """Reversible blocks one after another; forward keeps the last output, whatever their number.

    Args:
        blocks: blocks of the stack, at least one.
    """

    def __init__(self, blocks: Sequence[Reversible]) -> None:
        super().__init__()
        if not blocks:
            raise ModelError("ReversibleStack: there are no blocks", hint="give at least one Reversible(f, g)")
        self.blocks = nn.ModuleList(blocks)
        self._tracker = RngTracker()

    def forward(self, x1: Tensor, x2: Tensor) -> _Pair:
        """Returns (y1, y2) of the last block; dropout inside is drawn the same again in backward."""
        if not torch.is_grad_enabled():
            return self._run(x1, x2)
        params = [param for param in self.parameters() if param.requires_grad]
        made: Any = _Stack.apply(self, len(params), x1, x2, *params)
        return made[0], made[1]

    def _run(self, x1: Tensor, x2: Tensor) -> _Pair:
        for block in self.blocks:
            x1, x2 = block(x1, x2)
        return x1, x2

    def run_noting_generators(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor, list[RngState]]:
        """Returns the output, and generators' states before each function of each block."""
        states: list[RngState] = []
        for block in self.blocks:
            assert isinstance(block, Reversible), "a stack of reversible blocks"
            states.append(capture((x1,), self._tracker))
            y1 = x1 + block.f(x2)
            states.append(capture((x1,), self._tracker))
            x1, x2 = y1, x2 + block.g(y1)
        return x1, x2, states

    def walk_back(
        self, outputs: _Pair, grads: _Pair, states: Sequence[RngState], params: Sequence[nn.Parameter]
    ) -> tuple[_Pair, dict[int, Tensor]]:
        """Goes through the blocks backwards, making each one's inputs and gradients.

        Returns:
            (gradients of the first block's inputs, gradients of parameters by id).
        """
        (y1, y2), (d1, d2) = outputs, grads
        found: dict[int, Tensor] = {}
        for position in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[position]
            assert isinstance(block, Reversible), "a stack of reversible blocks"
            before_f, before_g = states[2 * position], states[2 * position + 1]
            g_y1, grad_y1 = self._through(block.g, y1, d2, before_g, params, found)
            x2, d1 = y2 - g_y1, d1 + grad_y1
            f_x2, grad_x2 = self._through(block.f, x2, d1, before_f, params, found)
            y1, y2, d2 = y1 - f_x2, x2, d2 + grad_x2
        return (d1, d2), found

    def _through(
        self,
        function: nn.Module,
        x: Tensor,
        grad: Tensor,
        state: RngState,
        params: Sequence[nn.Parameter],
        found: dict[int, Tensor],
    ) -> _Pair:
        """Runs a function again; returns (its output, the gradient of `x`), and adds gradients of its parameters."""
        leaf = x.detach().requires_grad_()
        own = {id(param) for param in function.parameters()}
        wanted = [param for param in params if id(param) in own]
        with torch.enable_grad(), replayed(state, self._tracker):
            output: Tensor = function(leaf)
        made: Any = torch.autograd.grad(output, [leaf, *wanted], grad, allow_unused=True)
        grads: tuple[Tensor | None, ...] = made
        for param, value in zip(wanted, grads[1:], strict=True):
            if value is not None:
                found[id(param)] = found[id(param)] + value if id(param) in found else value
        return output.detach(), torch.zeros_like(x) if grads[0] is None else grads[0]


class _Stack(torch.autograd.Function):
    """The stack as one node: its gradients of parameters flow out like those of any operation."""

    @staticmethod
    def forward(ctx: Any, stack: ReversibleStack, count: int, x1: Tensor, x2: Tensor, *params: Tensor) -> _Pair:
        with running_again(SecondRun(whole=1)):
            y1, y2, ctx.states = stack.run_noting_generators(x1, x2)
        ctx.stack = stack
        ctx.count = count
        ctx.save_for_backward(y1, y2, *params)
        return y1, y2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y1, y2, *_ = ctx.saved_tensors
        params = [param for param in ctx.stack.parameters() if param.requires_grad]
        assert len(params) == ctx.count, "no parameter was frozen between forward and backward"
        (d1, d2), found = ctx.stack.walk_back((y1, y2), (grads[0], grads[1]), ctx.states, params)
        return None, None, d1, d2, *(found.get(id(param)) for param in params)
