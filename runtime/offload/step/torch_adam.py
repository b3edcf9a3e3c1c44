"""Adam and AdamW block by block through torch's fused kernel for the CPU: its bits, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat import fused_adam
from ...optim.states.places import adam_state_names, adam_step_count
from ..states.blockwise import held_state, made_state
from ..states.range_work import RangeWork
from .blocks import BlockCutter
from .lanes import Lanes


class AdamBlocks:
    """Steps ranges as `torch.optim.Adam(fused=True)` and `AdamW(fused=True)` step a tensor.

    Args:
        block_numel: elements of a block.
        threads: number of threads that share a range; None for as many as torch's operations use; see `Lanes`.
    """

    def __init__(self, block_numel: int, *, threads: int | None) -> None:
        self._block_numel = block_numel
        self._lanes = Lanes(threads)
        self._cutters: dict[int, BlockCutter] = {}

    def step(self, work: RangeWork) -> None:
        """Updates one range; see `BlockStep`."""
        kernel, names = fused_adam(work.options, count_step(work)), adam_state_names(work.options)
        states = [held_state(work, name, widens=True) or made_state(work, name) for name in names]

        @torch.no_grad()
        def share(lane: int, first: int, last: int) -> None:
            cutter = self._cutters.setdefault(lane, BlockCutter(self._block_numel))
            # Lanes part where blocks of codes do.
            for _, master, grad, parts in cutter.blocks(work, states, max(0, first - work.head), last - work.head):
                kernel(master, grad, parts)

        self._lanes.divide(work.head + work.numel, share)
        work.settle()


def count_step(work: RangeWork) -> Tensor:
    """Adds the step to the range's count, and returns that."""
    if "step" not in work.scalars:
        work.scalars["step"] = adam_step_count(work.options, torch.device("cpu"))
    return work.scalars["step"].add_(1)


def ready_states(work: RangeWork) -> list[Tensor]:
    """Returns the range's fp32 states in the order of `adam_state_names`; those that are not there yet are zeros."""
    names = adam_state_names(work.options)
    return [work.states[name] if name in work.states else work.add_state(name, torch.float32) for name in names]
