"""How many threads torch's operations of the calling thread use while something runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ...compat import set_own_threads


@contextmanager
def inner_threads(count: int | None) -> Generator[None]:
    """Lets operations of this thread use `count` threads; operations of other threads keep theirs.

    Args:
        count: number of threads, at least 1; None for as many as the thread's operations use now.
    """
    before = torch.get_num_threads()
    if count is None:
        yield
        return
    set_own_threads(count)
    try:
        yield
    finally:
        set_own_threads(before)
