"""Adam and AdamW block by block through torch's fused kernel for the CPU: its bits, in one pass over memory."""

from __future__ import annotations

import torch

from ..compat import fused_adam
from ..optim.housing import adam_state_names, adam_step_count
from .block_cut import BlockCutter
from .block_work import RangeWork


class AdamBlocks:
    """Steps ranges as `torch.optim.Adam(fused=True)` and `AdamW(fused=True)` step a tensor.

    Args:
        cutter: cuts ranges into blocks.
    """

    def __init__(self, cutter: BlockCutter) -> None:
        self._cutter = cutter

    @torch.no_grad()
    def step(self, work: RangeWork) -> None:
        """Updates one range; see `BlockStep`."""
        options, names = work.options, adam_state_names(work.options)
        for name in names:
            if name not in work.states:
                work.add_state(name, work.master_N.dtype)
        if "step" not in work.scalars:
            work.scalars["step"] = adam_step_count(options, work.master_N.device)
        count = work.scalars["step"].add_(1)
        for block in self._cutter.blocks(work):
            fused_adam(block.master, block.grad, [block.states[name] for name in names], count, options)
