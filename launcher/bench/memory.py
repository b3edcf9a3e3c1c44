"""How fast this process may copy memory: by one core, and by all it may use at once. No numpy, no compiler.

Buffers are far larger than caches and stand on huge pages where the kernel gives them, so that neither the caches nor
the page tables are what is measured. A copy of n bytes counts as n, as a user's own copy would, though memory sees
at least 2 n.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dsrun.errors import LaunchError
from dsrun.host.memory import read_host_memory

from ..machine.cgroup import read_limits
from ..machine.proc_files import usable_cores
from .figure import LEAST_REPETITIONS, Figure, figure

#: Of each of a core's two buffers: several times what a core has of the last cache.
BUFFER_BYTES = 128 << 20
_LEAST_BUFFER_BYTES = 4 << 20
#: Of what is free; a measurement must not be what ends somebody's job.
_SHARE = 8
_REPETITION_S = 0.2


def answer(arguments: dict[str, Any], keep: ExitStack) -> Any:
    """Answers the question `bench_memory`; takes no arguments. See [Note: questions] in survey/server."""
    return [one.to_json() for one in measure(sorted(os.sched_getaffinity(0)))]


def measure(
    cpus: Sequence[int],
    *,
    buffer_bytes: int = BUFFER_BYTES,
    repetition_s: float = _REPETITION_S,
    repetitions: int = LEAST_REPETITIONS,
) -> list[Figure]:
    """Copies memory with one core, then with all.

    Args:
        cpus: processors it may run on.
        buffer_bytes: bytes of each of the two buffers of a core; fewer where memory is short.
        repetition_s: length of one.
        repetitions: number of repetitions of each figure.

    Returns:
        copied bytes a second by one core, and by all that the quota allows where there are several.

    Raises:
        LaunchError: there is not even memory for small buffers.
    """
    cores = usable_cores(cpus, read_limits(Path("/")).quota_cores)
    size = min(buffer_bytes, _room() // (2 * cores * _SHARE)) // mmap.PAGESIZE * mmap.PAGESIZE
    if size < min(buffer_bytes, _LEAST_BUFFER_BYTES):
        raise LaunchError("there is not enough free memory to measure it", hint="see `dsrun probe` for who holds it")
    figures = [figure("memory copy, one core", "B/s", _copy(cpus[:1], size, repetition_s, repetitions))]
    if cores > 1:
        rates = _copy(cpus[:cores], size, repetition_s, repetitions)
        figures.append(figure(f"memory copy, {cores} cores", "B/s", rates))
    return figures


def huge_buffer(size: int) -> mmap.mmap:
    """Returns zeroed memory of its own, on huge pages where the kernel gives them, and touched.

    Args:
        size: bytes of the buffer, a multiple of the page size.

    Raises:
        OSError: there is no room.
    """
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        # A kernel without transparent huge pages has small ones, which do somewhat slower.
        buffer.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, mmap.PAGESIZE):
        buffer[at] = 1
    return buffer


def _copy(cpus: Sequence[int], size: int, repetition_s: float, repetitions: int) -> list[float]:
    """Returns bytes a second of all cores together, once a repetition."""
    # ctypes lets go of the interpreter's lock while it copies, so threads do, and each touches its own memory first.
    barrier = threading.Barrier(len(cpus))
    copied = [[(0, 0.0)] * len(cpus) for _ in range(repetitions)]
    faults: list[BaseException] = []

    def run(place: int, cpu: int) -> None:
        try:
            os.sched_setaffinity(0, [cpu])
            source, target = ((ctypes.c_char * size).from_buffer(huge_buffer(size)) for _ in range(2))
            for results in copied:
                barrier.wait()
                begun_s, count = time.perf_counter(), 0
                while (took_s := time.perf_counter() - begun_s) < repetition_s or not count:
                    ctypes.memmove(target, source, size)
                    count += 1
                results[place] = (count * size, took_s)
        except BaseException as error:
            # Raised below, by the thread that asked.
            faults.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(cpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = next((fault for fault in faults if not isinstance(fault, threading.BrokenBarrierError)), None)
    if first is not None:
        raise first
    return [sum(count / took_s for count, took_s in results) for results in copied]


def _room() -> int:
    available = read_host_memory().available_bytes or 0
    left = read_limits(Path("/")).memory_left_bytes
    return available if left is None else min(available, left)
