"""Host memory that training state lies in for long: reserved once, in huge pages, and page-locked where copies want it.

What lies there is its owners' business; how it crosses the bus, `bus.py` knows.

[Note: host memory]
A reservation is one anonymous mapping. Huge pages are asked for, because a step over gigabytes otherwise spends a good
part of its time on page tables; pages come into being where the thread that writes them first runs, so ranks that are
bound to the cores of one NUMA node have their memory there. Page-locking is what lets an accelerator copy beside its
computing: a mapping is registered with the driver after it is made, which takes as many bytes as there are, where
torch's own pinned memory takes the next power of two.
What is page-locked is not inherited by a fork (a DataLoader's worker): the kernel would copy all of it at the fork, for
pages under copies must stay the parent's, or give the parent other pages while copies go on to the old ones. A fork
that reads it ends by a signal, and not with wrong numbers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from dsrun.host.memory import read_host_memory
from dsrun.units import format_bytes

from .page_lock import CannotLock, CudaLock, Lock

#: Says something once for the whole job.
Say = Callable[[str], None]

_EFFECT = "copies do not overlap with compute. Raise `ulimit -l`, or set `pin_memory` to false to be told no more."


class HostPool:
    """Makes host memory, see [Note: host memory].

    Args:
        lock: page-locks what is reserved; None: it stays pageable.
        say: function that reports, once, the reason memory is pageable after all.
    """

    def __init__(self, lock: Lock | None, *, say: Say) -> None:
        self._lock = lock
        self._say = say

    @property
    def pins(self) -> bool:
        """Whether what is reserved from here on is page-locked."""
        return self._lock is not None

    def zeros(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Returns flat, zeroed host memory; page-locked, or of pages that come into being as they are written.

        It goes back to the system with the last tensor that lies in it.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.zeros(0, dtype=dtype)
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        if self._lock is None:
            return torch.frombuffer(pages, dtype=dtype)
        # What the tensor's storage holds on to, and the last of it to go: the finalizer has the mapping itself.
        held = (ctypes.c_char * nbytes).from_buffer(pages)
        memory = torch.frombuffer(held, dtype=dtype)
        pages.madvise(mmap.MADV_DONTFORK)
        try:
            unlock = self._lock(memory.data_ptr(), nbytes)
        except CannotLock as reason:
            pages.madvise(mmap.MADV_DOFORK)
            self._lock = None
            self._say(why_pageable(nbytes, str(reason), effect=_EFFECT))
        else:
            weakref.finalize(held, _let_go, unlock, pages, os.getpid())
        return memory


def host_pool_for(device: torch.device, *, pin: bool, say: Say) -> HostPool:
    """Returns the pool of a device's host.

    Args:
        device: device that copies to and from the memory, which is page-locked for CUDA devices alone. The CPU copies
            from any memory.
        pin: whether to page-lock what is reserved, where that works.
        say: function that reports, once, the reason memory is pageable after all.
    """
    return HostPool(CudaLock(device) if pin and device.type == "cuda" else None, say=say)


def why_pageable(nbytes: int, failure: str, *, effect: str) -> str:
    """Returns a warning: what could not be page-locked, why, and what limits there are.

    Args:
        nbytes: bytes that could not be page-locked.
        failure: the system's reason.
        effect: effect of the pageable memory, and advice on what to do.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return (
        f"dsrun: {format_bytes(nbytes)} of host memory could not be page-locked ({failure}; locked memory may be "
        f"{limit}, free is {format_bytes(available_bytes())}): {effect}"
    )


def available_bytes() -> int:
    """Returns how much host memory may be taken without anything being swapped out, as the kernel tells it."""
    return read_host_memory().available_bytes or 0


def _let_go(unlock: Callable[[], object], pages: mmap.mmap, process: int) -> None:
    """Unlocks first: the mapping, an argument of this call, goes with its end."""
    if os.getpid() == process:
        unlock()
    else:
        # A fork has not inherited it, and has something else at its addresses by now, which must not be unmapped.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))
