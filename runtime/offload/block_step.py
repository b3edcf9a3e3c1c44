"""The optimizer's step on the host in one pass over memory: which way there is for which optimizer.

How blocks are cut and stepped is in the modules beside; where ranges lie and when they are stepped is the driver's.
"""

from __future__ import annotations

from torch import optim

from ..optim.aliases import DeepSpeedCPUAdam, FusedAdam
from .block_cut import BlockCutter
from .block_step_adam import AdamBlocks
from .block_step_generic import OwnCodeBlocks, check_parts
from .block_work import BlockStep, RangeWork
from .split_master import SplitMaster

__all__ = ["BLOCK_NUMEL", "BlockStep", "RangeWork", "SplitMaster", "block_step_for"]

#: Elements of a block: its fp32 gradient and master, which are read twice, take 8 MiB of the last cache, and what
#: Python costs a block is small beside 28 MiB that go to and from memory.
BLOCK_NUMEL = 1 << 20

_ADAMS = (optim.Adam, optim.AdamW, FusedAdam, DeepSpeedCPUAdam)


def block_step_for(
    optimizer: optim.Optimizer, *, block_numel: int = BLOCK_NUMEL, threads: int | None = None
) -> BlockStep:
    """Returns what steps ranges as an optimizer would, bit for bit.

    Args:
        optimizer: whose arithmetic it is; not stepped, and none of its state is touched.
        block_numel: elements of a block, a multiple of 256.
        threads: that torch's operations use in a step; None: as many as those of the thread that calls `step`.

    Raises:
        ModelError: the optimizer gives parts of a vector other values than the whole.
    """
    if type(optimizer) in _ADAMS and all(group.get("fused") for group in optimizer.param_groups):
        return AdamBlocks(BlockCutter(block_numel), threads=threads)
    check_parts(optimizer)
    return OwnCodeBlocks(optimizer, BlockCutter(block_numel), threads=threads)
