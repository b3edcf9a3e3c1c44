"""Threads that each take a part of a range, the same part every step, and step it by themselves.

[Note: lanes]
A step that lets torch divide every operation among threads meets them several times a block, and while another thread
of the process computes on the same cores each meeting waits for whoever is not running: ten times the time was seen.
A lane meets the others once a range, and its block stays in its own core's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from ...compat import set_own_threads
from .inner_threads import inner_threads

#: Elements that ranges are cut by: whole pages of every tensor, whole vectors, and worth the call to another thread.
_CUT = 1 << 14


class Lanes:
    """See [Note: lanes]. One range at a time.

    Args:
        count: number of lanes, the calling thread's included; None for as many as torch's operations use in the first
            thread that asks.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._pool: ThreadPoolExecutor | None = None

    def divide(self, numel: int, share: Callable[[int, int, int], None]) -> None:
        """Calls `share(lane, first, last)` for parts of [0, numel) at once, torch's operations in one thread each.

        Args:
            numel: elements of the range.
            share: may not touch what is outside of its part.
        """
        count = self._count = self._count or torch.get_num_threads()
        cuts = [min(numel, -(-numel * lane // (count * _CUT)) * _CUT) for lane in range(count)] + [numel]
        own, *others = [(lane, cuts[lane], cuts[lane + 1]) for lane in range(count) if cuts[lane] < cuts[lane + 1]] or [
            (0, 0, 0)
        ]
        with inner_threads(1):
            if others and self._pool is None:
                self._pool = _single_threaded(count - 1)
            waiting = [self._pool.submit(share, *part) for part in others] if self._pool is not None else []
            try:
                share(*own)
            finally:
                # Nobody touches the range when this returns, whatever has failed.
                failures = [work.exception() for work in waiting]
        for failure in failures:
            if failure is not None:
                raise failure


def _single_threaded(count: int) -> ThreadPoolExecutor:
    """Returns threads in which torch's operations use one thread."""
    return ThreadPoolExecutor(count, thread_name_prefix="dsrun host step", initializer=partial(set_own_threads, 1))
