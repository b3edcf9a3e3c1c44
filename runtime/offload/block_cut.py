"""A range cut into blocks that stay in the cache while gradient, master, states and parameter are worked on.

What is kept in fewer bits (16-bit gradients and masters, split masters) is fp32 here, one block at a time. No optimizer
is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .block_work import RangeWork
from .scratch import Scratch


class Block(NamedTuple):
    """Views of one block: not a dataclass, for one is made every few hundred microseconds.

    Attributes:
        start: its first element, in the range.
        master: fp32.
        grad: fp32, scaled; valid until the next block is cut.
        states: in the order in which they were asked for.
    """

    start: int
    master: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]


class BlockCutter:
    """Cuts ranges into blocks, and brings each block to what an optimizer reads.

    Args:
        numel: elements of a block; a multiple of 256, so that torch's kernels find no vector's tail but the range's.
    """

    def __init__(self, numel: int) -> None:
        assert numel > 0, "a block has elements"
        assert numel % 256 == 0, f"blocks of {numel} elements would be cut within a vector"
        self._numel = numel
        self.scratch = Scratch()

    def blocks(self, work: RangeWork, states: Sequence[Tensor]) -> Iterator[Block]:
        """Yields the blocks of a range in order; behind each, its new masters are put where they belong.

        Args:
            work: the range.
            states: those to be cut, [N] each.
        """
        if not work.numel:
            return
        grads, cut = work.grads_N.split(self._numel), [state.split(self._numel) for state in states]
        outs = None if work.params_out_N is None else work.params_out_N.split(self._numel)
        ties: list[Tensor] = []
        for number, (master, grad) in enumerate(zip(self._masters(work, ties), grads, strict=True)):
            parts = tuple([state[number] for state in cut])
            yield Block(number * self._numel, master, self._grad(grad, work.grad_scale), parts)
            if outs is not None:
                outs[number].copy_(master)

    def _masters(self, work: RangeWork, ties: list[Tensor]) -> Iterator[Tensor]:
        """Yields the masters of each block in fp32; others are written back when the next is asked for."""
        if isinstance(work.master_N, Tensor):
            for master in work.master_N.split(self._numel):
                if master.dtype == torch.float32:
                    yield master
                else:
                    wide = self.scratch.take("master", master.numel()).copy_(master)
                    yield wide
                    master.copy_(wide)
            return
        halves = work.master_N
        for start in range(0, work.numel, self._numel):
            master = halves.join(start, min(start + self._numel, work.numel), self.scratch)
            yield master
            ties.append(halves.split(start, master, self.scratch))
        halves.ties = torch.cat(ties)

    def _grad(self, grads: Tensor, scale: float) -> Tensor:
        """Returns gradients in fp32, multiplied by `scale` as the engine multiplies them: in fp32, rounded once."""
        if grads.dtype == torch.float32 and scale == 1:
            return grads
        scratch = self.scratch.take("gradient", grads.numel())
        if grads.dtype == torch.float32:
            # Not in place: what is not written does not go back to memory.
            return torch.mul(grads, scale, out=scratch)
        scratch.copy_(grads)
        return scratch if scale == 1 else scratch.mul_(scale)
