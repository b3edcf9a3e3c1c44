"""Lines about memory, by DeepSpeed's names, for scripts that print them. dsrun's records are elsewhere (`observe`)."""

from __future__ import annotations

import gc

import psutil
import torch.distributed as dist

from ..accelerator import get_accelerator

_GIB = 1 << 30
#: Bytes of this process's last `memory_status`: of tensors, and reserved.
_last_figures = [0, 0]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints a message and how much memory is in use, on rank 0 or a lone process; the next call has a peak of its own.

    Args:
        message: first line.
        force: False: nothing happens, as in DeepSpeed.
    """
    if not force or own_rank() != 0:
        return
    gc.collect()
    accelerator = get_accelerator()
    figures = {
        "MA": round(accelerator.memory_allocated() / _GIB, 2),
        "Max_MA": round(accelerator.max_memory_allocated() / _GIB, 2),
        "CA": round(accelerator.memory_reserved() / _GIB, 2),
        "Max_CA": round(accelerator.max_memory_reserved() / _GIB),
    }
    print(message)
    print("".join(f"{name} {figure} GB         " for name, figure in figures.items()))
    host = psutil.virtual_memory()
    used = round((host.total - host.available) / _GIB, 2)
    print(f"CPU Virtual Memory:  used = {used} GB, percent = {host.percent}%")
    accelerator.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Prints how much memory tensors take and how much is reserved, and how much that is more than in the last call.

    Args:
        msg: words before the figures.
        print_rank: rank that prints; -1: all do.
        reset_max: look for the most memory anew.
    """
    rank = own_rank()
    if print_rank not in (-1, rank):
        return
    accelerator = get_accelerator()
    accelerator.synchronize()
    if reset_max:
        accelerator.reset_peak_memory_stats()
    now = (accelerator.memory_allocated(), accelerator.memory_cached())
    most = (accelerator.max_memory_allocated(), accelerator.max_memory_cached())
    before = tuple(_last_figures)
    _last_figures[:] = now
    words = [
        f"current {name}={bytes_ / _GIB:0.4f}GB (delta={(bytes_ - last) / _GIB:0.4f}GB max={peak / _GIB:0.4f}GB)"
        for name, bytes_, last, peak in zip(("alloc", "cache"), now, before, most, strict=True)
    ]
    print(f"RANK={rank} MEMSTATS", msg, f"device={accelerator.current_device_name()}", *words)


def get_ma_status() -> int:
    """Returns the memory of tensors on rank 0 or in a lone process, in bytes; 0 on other ranks."""
    return get_accelerator().memory_allocated() if own_rank() == 0 else 0


def empty_cache() -> None:
    """Gives memory back that no tensor has, and looks for the most memory anew."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def own_rank() -> int:
    """Returns this process's rank; 0 for a lone process."""
    return dist.get_rank() if dist.is_initialized() else 0
