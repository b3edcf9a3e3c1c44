"""What an accelerator has free for this process, and for others: torch's allocator keeps what tensors have let go of.

What the room is used for, its callers know.
"""

from __future__ import annotations

from typing import Any

import torch


def free_bytes(device: torch.device, *, at_peak: bool = False, module: Any = None) -> int:
    """Returns the bytes that this process may still take on an accelerator; its allocator's unused ones among them.

    Args:
        device: the accelerator.
        at_peak: whether to return the bytes free when most was in use since the peaks were reset; if not, those free
            now.
        module: torch's for its kind; None: that.
    """
    module = torch.get_device_module(device) if module is None else module
    free, _ = module.mem_get_info(device)
    used = module.max_memory_allocated(device) if at_peak else module.memory_allocated(device)
    return int(free) + max(0, module.memory_reserved(device) - used)


def give_cache_back(device: torch.device, *, module: Any = None) -> None:
    """Gives the memory that no tensor uses to whoever wants it: other processes, and libraries beside torch.

    Waits for the device where there is any. A CPU's memory is given back by who frees it.

    Args:
        device: device on which the unused memory lies.
        module: torch's for its kind; None: that.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device) if module is None else module
        with module.device(device):
            module.empty_cache()
