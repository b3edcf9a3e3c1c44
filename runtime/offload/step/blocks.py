"""A range cut into blocks that stay in the cache while gradient, master, states and parameter are worked on.

What is kept in fewer bits (16-bit gradients and masters, split masters, states of 16 and 8 bits) is fp32 here, one
block at a time. No optimizer is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...optim.structure.codes import BLOCK
from ..states.blockwise import StateAccess
from ..states.range_work import RangeWork
from ..states.scratch import Scratch

#: Elements of a block whose states are coded: several tensors of its size come between codes and values.
_CODED_NUMEL = 1 << 16


class Block(NamedTuple):
    """Views of one block: not a dataclass, for one is made every few hundred microseconds.

    Attributes:
        start: its first element, in the range.
        master: fp32.
        grad: fp32, scaled; valid until the next block is cut.
        states: states in the order in which they were asked for, fp32 or as the optimizer's own code has made them;
            written back when the next block is cut.
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

    def blocks(self, work: RangeWork, states: Sequence[StateAccess], first: int, last: int) -> Iterator[Block]:
        """Yields the blocks of a part of a range in order; behind each, masters and states are put where they belong.

        Args:
            work: the range.
            states: those to be cut.
            first: first element of the part: 0, or the start of a block of codes.
            last: one past it.
        """
        numel = min(self._numel, _CODED_NUMEL) if work.form.is_coded else self._numel
        stop = first
        while stop < last:
            start, stop = stop, min(last, stop + numel - (work.head + stop) % BLOCK)
            for target, source in work.origins:
                target[start:stop].copy_(source[start:stop])  # read by the step while it is in the cache
            master, put_back = self._master(work, start, stop)
            grad = self._grad(work.grads_N[start:stop], work.grad_scale)
            parts = tuple([state.open(start, stop, self.scratch, f"state {i}") for i, state in enumerate(states)])
            yield Block(start, master, grad, parts)
            for state, values in zip(states, parts, strict=True):
                state.close(start, values)
            put_back()
            if work.params_out_N is not None:
                work.params_out_N[start:stop].copy_(master)

    def _master(self, work: RangeWork, start: int, stop: int) -> tuple[Tensor, Callable[[], object]]:
        """Returns a block's masters in fp32, and what writes them back where they are copies."""
        if not isinstance(work.master_N, Tensor):
            halves = work.master_N
            joined = halves.join(start, stop, self.scratch)
            return joined, lambda: halves.split(start, joined, self.scratch)
        master = work.master_N[start:stop]
        if master.dtype == torch.float32:
            return master, _nothing
        wide = self.scratch.take("master", stop - start).copy_(master)
        return wide, lambda: master.copy_(wide)

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


def _nothing() -> None:
    """They are where they belong."""
