"""The pages behind a process's memory: taken when they are first written, and given back when their tensors are gone.

What lies in them, and for how long, is decided in `arena.py` and by who makes arenas.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

#: glibc's alone has it; other C libraries give freed memory back by themselves, or have no way to be asked.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def fresh_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns flat, zeroed memory of this process alone; on a CPU it takes no page before somebody writes there.

    `torch.zeros` writes all of it at once: 0.4 s a GiB on the machine of docs/benchmarks.md, where the engine is made,
    for gradient sums and optimizer states that the first step writes anyway, and that an evaluation never does. An
    arena is reserved beside what its contents are made from, which would cost its memory twice for a while.
    Transparent huge pages were measured too, and take as long to be zeroed there.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.zeros(numel, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


def give_freed_pages_back() -> None:
    """Gives the kernel what tensors have freed; the C library keeps up to all of it for allocations to come.

    Worth a call where much is freed for good, as a model's first tensors are.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
