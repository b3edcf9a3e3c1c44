"""One thread, as the ranks of other tests have it, and no process group left behind by a rank of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A test that trains in this process is rank 0 of 1, and leaves its process group."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()
