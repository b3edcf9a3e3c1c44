"""The optimizer's step on the host in one pass over memory: which way there is for which optimizer.

How blocks are cut and stepped is in the modules beside; where ranges lie and when they are stepped is the driver's.
"""

from __future__ import annotations

from torch import optim

from ..optim.aliases import DeepSpeedCPUAdam, FusedAdam
from .block_cut import BlockCutter
from .block_step_adam import AdamBlocks
from .block_step_generic import OwnCodeBlocks
from .block_work import BlockStep, RangeWork

__all__ = ["BLOCK_NUMEL", "BlockStep", "RangeWork", "block_step_for"]

#: Elements of a block.
BLOCK_NUMEL = 1 << 19

_ADAMS = (optim.Adam, optim.AdamW, FusedAdam, DeepSpeedCPUAdam)


def block_step_for(optimizer: optim.Optimizer, *, block_numel: int = BLOCK_NUMEL) -> BlockStep:
    """Returns what steps ranges as an optimizer would, bit for bit.

    Args:
        optimizer: whose arithmetic it is; not stepped, and none of its state is touched.
        block_numel: elements of a block, a multiple of 256.

    Raises:
        ModelError: the optimizer is not elementwise, or keeps count of steps where ranges cannot have their own.
    """
    cutter = BlockCutter(block_numel)
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) in _ADAMS and fused:
        return AdamBlocks(cutter)
    return OwnCodeBlocks(optimizer, cutter)
