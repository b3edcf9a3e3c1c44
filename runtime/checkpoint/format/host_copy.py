"""Bytes from memory to memory, by as many threads as are worth it.

One core does not fill the memory's bandwidth on most machines. torch would use the threads of its operations, which in
a rank that trains meanwhile belong to forward and backward; here the number is said.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from dsrun.contract.environment import RankInfo

#: What a thread copies at a time.
_CHUNK_BYTES = 8 << 20
#: More threads than these fill no memory's bandwidth any better.
_MOST_THREADS = 4


def idle_threads(cores: int, *, all_cores: int, ranks: int) -> int:
    """Returns how many threads may copy while this process does nothing else.

    Args:
        cores: number of CPU cores that the process may use.
        all_cores: number of CPU cores of the host; if the process may use all of them, the other ranks may, too.
        ranks: number of ranks on the host.
    """
    return max(1, min(_MOST_THREADS, cores if cores < all_cores else cores // ranks))


def own_idle_threads() -> int:
    """Returns the same for this process, whose environment says how many ranks its host has."""
    ranks = RankInfo.from_env().local_world_size
    return idle_threads(len(os.sched_getaffinity(0)), all_cores=os.cpu_count() or 1, ranks=ranks)


def copy_bytes(copies: Sequence[tuple[Tensor, Tensor]], *, threads: int) -> None:
    """Copies the bytes of each second tensor to where the first begins; other threads of Python go on meanwhile.

    Args:
        copies: (uint8 on the CPU, at least as long as what is copied; contiguous on the CPU).
        threads: number of threads that copy, at least 1.
    """
    chunks = list(_chunks(copies))
    if threads == 1 or len(chunks) == 1:
        for chunk in chunks:
            ctypes.memmove(*chunk)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="staging") as pool:
        for done in [pool.submit(ctypes.memmove, *chunk) for chunk in chunks]:
            done.result()


def _chunks(copies: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[int, int, int]]:
    """Yields (to, from, bytes)."""
    for into, values in copies:
        assert values.nbytes <= into.nbytes, "there is room for what is copied"
        assert values.is_contiguous(), "its bytes lie one behind the other"
        for first in range(0, values.nbytes, _CHUNK_BYTES):
            nbytes = min(_CHUNK_BYTES, values.nbytes - first)
            yield into.data_ptr() + first, values.data_ptr() + first, nbytes
