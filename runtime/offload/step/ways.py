"""The optimizer's step on the host in one pass over memory: which way there is for which optimizer.

How blocks are cut and stepped is in the modules beside; where ranges lie and when they are stepped is the driver's.
"""

from __future__ import annotations

import logging

from torch import optim

from dsrun.errors import DsrunError

from ...optim.algorithms.deepspeed_classes import DeepSpeedCPUAdam, FusedAdam
from ..states.range_work import BlockStep, RangeWork
from ..states.split_master import SplitMaster
from .any_elementwise import OwnCodeBlocks, check_parts
from .blocks import BlockCutter
from .build_pass import built_pass
from .compiled_adam import CompiledAdam, load_pass
from .torch_adam import AdamBlocks

__all__ = ["BlockStep", "RangeWork", "SplitMaster", "block_step_for"]

_log = logging.getLogger(__name__)

#: Elements of a block for torch's fused kernel. What a lane reads twice, the fp32 gradient and the master, takes 4 MiB,
#: and what Python costs a block is little beside the 14 MiB that go to and from memory.
_FUSED_NUMEL = 1 << 19
#: For an optimizer's own code, which reads and writes a block many times and makes others of its size.
_OWN_NUMEL = 1 << 18

_ADAMS = (optim.Adam, optim.AdamW, FusedAdam, DeepSpeedCPUAdam)


def block_step_for(
    optimizer: optim.Optimizer,
    *,
    block_numel: int | None = None,
    threads: int | None = None,
    compiled: bool = True,
) -> BlockStep:
    """Returns what steps ranges as an optimizer would, bit for bit.

    Args:
        optimizer: optimizer that gives the arithmetic; it is not stepped, and none of its state is touched.
        block_numel: elements of a block, a multiple of 256; None: what was found best.
        threads: number of threads of a step; None for as many as torch's operations use in the thread that calls
            `step`. If another thread computes meanwhile, give the step its own cores, and as many threads.
        compiled: whether to use the compiled pass for Adam where one was built on purpose; see `build_pass`.

    Raises:
        ModelError: the optimizer gives parts of a vector other values than the whole.
    """
    if type(optimizer) not in _ADAMS or not all(group.get("fused") for group in optimizer.param_groups):
        check_parts(optimizer)
        return OwnCodeBlocks(optimizer, BlockCutter(block_numel or _OWN_NUMEL), threads=threads)
    blocks = AdamBlocks(block_numel or _FUSED_NUMEL, threads=threads)
    path = built_pass() if compiled else None
    if path is None:
        return blocks
    try:
        return CompiledAdam(load_pass(path), blocks, threads=threads)
    except DsrunError as error:
        _log.warning("The optimizer's step on the host runs through torch: %s; %s", error, error.hint)
        return blocks
