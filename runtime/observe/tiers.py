"""What each tier of memory holds for this process now, as the system and the allocators tell it. Keeps nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from dsrun.memory_use.samples import CPU, GPU, TierUse

from .memory import resident_bytes
from .peaks import process_peak_bytes


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later, mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def read_tiers(device: torch.device, *, kinds: tuple[tuple[str, int], ...] = ()) -> tuple[TierUse, ...]:
    """Reads the device's tier, and on a GPU the host's after it. Costs a few system calls; waits for no kernel.

    Args:
        device: device that the model is on.
        kinds: known uses of the device's memory, each as (name, bytes).
    """
    if device.type != "cuda":
        return (_host(kinds),)
    stats = torch.cuda.memory_stats(device)
    gpu = TierUse(
        tier=GPU,
        held_bytes=stats.get("reserved_bytes.all.current", 0),
        peak_bytes=stats.get("allocated_bytes.all.peak", 0),
        live_bytes=stats.get("allocated_bytes.all.current", 0),
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
        kinds=kinds,
    )
    return gpu, _host(())


def live_bytes_of(use: TierUse) -> int:
    """Returns what a leak would make grow: bytes in use, or resident where the allocator does not tell."""
    return use.held_bytes if use.live_bytes is None else use.live_bytes


def malloc_bytes() -> tuple[int, int] | None:
    """Returns (in use, reserved) bytes of malloc, which torch's host tensors come from; arenas may be shared memory.

    None where the C library does not tell (musl; glibc before 2.33), or where another allocator was preloaded and
    the C library's own has nothing.
    """
    if (function := _mallinfo()) is None:
        return None
    info = function()
    reserved = info.arena + info.hblkhd
    return (info.uordblks + info.hblkhd, reserved) if info.uordblks else None


def _host(kinds: tuple[tuple[str, int], ...]) -> TierUse:
    told = malloc_bytes()
    live, reserved = (None, None) if told is None else told
    held = resident_bytes()
    return TierUse(
        tier=CPU,
        held_bytes=held,
        # The kernel counts pages per processor and adds them up late: the mark may stand below what is resident.
        peak_bytes=max(held, process_peak_bytes()),
        live_bytes=live,
        reserved_bytes=reserved,
        kinds=kinds,
    )


@lru_cache(maxsize=1)
def _mallinfo() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    function.restype = _MallocInfo
    return function
