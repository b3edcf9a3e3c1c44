"""How many threads torch's operations of the calling thread use while something runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def inner_threads(count: int | None) -> Generator[None]:
    """Lets operations of this thread use `count` threads; operations of other threads keep theirs.

    torch keeps the number for each thread, and gives the last one set to threads that begin: one that begins meanwhile
    takes `count` too.

    Args:
        count: at least 1; None: as many as they use now.
    """
    before = torch.get_num_threads()
    if count is None:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
