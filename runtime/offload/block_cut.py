"""A range cut into blocks that stay in the cache while gradient, master, states and parameter are worked on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_work import RangeWork


@dataclass(frozen=True, slots=True)
class Block:
    """Views of one block.

    Attributes:
        start: its first element, in the range.
        master: fp32.
        grad: fp32, scaled; valid until the next block is cut.
        states: by name.
        out: of `params_out_N`.
    """

    start: int
    master: Tensor
    grad: Tensor
    states: dict[str, Tensor]
    out: Tensor | None


class BlockCutter:
    """Cuts ranges into blocks, and brings each block's gradients to what an optimizer reads: fp32 and scaled.

    Args:
        numel: elements of a block; a multiple of 256, so that torch's kernels find no vector's tail but the range's.
    """

    def __init__(self, numel: int) -> None:
        assert numel > 0, "a block has elements"
        assert numel % 256 == 0, f"blocks of {numel} elements would be cut within a vector"
        self._numel = numel
        self._scratch = torch.empty(0)

    def blocks(self, work: RangeWork) -> Iterator[Block]:
        """Yields the blocks of a range in order; what was updated is written to `params_out_N` behind each."""
        total = work.master_N.numel()
        for start in range(0, total, self._numel):
            numel = min(self._numel, total - start)
            cut = slice(start, start + numel)
            block = Block(
                start,
                work.master_N[cut],
                self._grad(work.grads_N[cut], work.grad_scale),
                {name: state[cut] for name, state in work.states.items()},
                None if work.params_out_N is None else work.params_out_N[cut],
            )
            yield block
            if block.out is not None:
                block.out.copy_(block.master)

    def _grad(self, grads: Tensor, scale: float) -> Tensor:
        """Returns gradients in fp32, multiplied by `scale` as the engine multiplies them: rounded once."""
        if grads.dtype == torch.float32 and scale == 1:
            return grads
        numel = grads.numel()
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel)
        scratch = self._scratch[:numel]
        if grads.dtype == torch.float32:
            # Not in place: what is not written does not go back to memory.
            return torch.mul(grads, scale, out=scratch)
        scratch.copy_(grads)
        return scratch if scale == 1 else scratch.mul_(scale)
