"""Adam and AdamW block by block through torch's fused kernel for the CPU: its bits, in one pass over memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..compat import fused_adam
from ..optim.housing import adam_state_names, adam_step_count
from .block_cut import BlockCutter
from .block_work import RangeWork
from .lanes import Lanes
from .scratch import Scratch


class AdamBlocks:
    """Steps ranges as `torch.optim.Adam(fused=True)` and `AdamW(fused=True)` step a tensor.

    Args:
        block_numel: elements of a block.
        threads: see `Lanes`.
    """

    def __init__(self, block_numel: int, *, threads: int | None) -> None:
        self._block_numel = block_numel
        self._lanes = Lanes(threads)
        self._cutters: dict[int, BlockCutter] = {}

    def step(self, work: RangeWork) -> None:
        """Updates one range; see `BlockStep`."""
        kernel, states = fused_adam(work.options, count_step(work)), ready_states(work)
        is_wide = all(state.dtype == torch.float32 for state in states)

        @torch.no_grad()
        def share(lane: int, first: int, last: int) -> None:
            cutter = self._cutters.setdefault(lane, BlockCutter(self._block_numel))
            for _, master, grad, parts in cutter.blocks(work, states, first, last):
                if is_wide:
                    kernel(master, grad, parts)
                    continue
                with _widened(parts, cutter.scratch) as wide:
                    kernel(master, grad, wide)

        self._lanes.divide(work.numel, share)
        work.settle()


def count_step(work: RangeWork) -> Tensor:
    """Adds the step to the range's count, and returns that."""
    if "step" not in work.scalars:
        work.scalars["step"] = adam_step_count(work.options, torch.device("cpu"))
    return work.scalars["step"].add_(1)


def ready_states(work: RangeWork) -> list[Tensor]:
    """Returns the range's states in the order of `adam_state_names`; those that are not there yet are zeros."""
    names = adam_state_names(work.options)
    return [work.states[name] if name in work.states else work.add_state(name, torch.float32) for name in names]


@contextmanager
def _widened(states: Sequence[Tensor], scratch: Scratch) -> Generator[list[Tensor]]:
    """Gives fp32 copies of states, and rounds them back into their places."""
    wide = [scratch.take(f"state {i}", state.numel()).copy_(state) for i, state in enumerate(states)]
    yield wide
    for state, values in zip(states, wide, strict=True):
        state.copy_(values)
