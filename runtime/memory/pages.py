"""The pages behind a process's memory: taken when they are first written, and given back when their tensors are gone.

What lies in them, and for how long, is decided in `arena.py` and by who makes arenas.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

_madvise = ctypes.CDLL(None, use_errno=True).madvise
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


def let_go_of(memory: Tensor) -> None:
    """Gives the memory behind a whole storage back; its tensors stay, and may be used again after `take_again`.

    On a CPU the pages alone go and the addresses stay, so it takes a mapping of `fresh_zeros`; on an accelerator the
    storage goes, and all of its views move with it when it comes back.

    Args:
        memory: all of a storage.
    """
    if memory.device.type != "cpu":
        memory.untyped_storage().resize_(0)
    elif _madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "madvise")


def take_again(memory: Tensor) -> None:
    """Undoes `let_go_of`; what the memory holds is undefined."""
    if memory.device.type != "cpu":
        memory.untyped_storage().resize_(memory.nbytes)


def give_freed_pages_back() -> None:
    """Gives the kernel what tensors have freed; the C library keeps up to all of it for allocations to come.

    Worth a call where much is freed for good, as a model's first tensors are.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
