"""One thread, as the ranks of other tests have it, and no process group left behind by a rank of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """What is there before a file's tests is taken out of the garbage collector's sight, as in a job's spawner.

    Each end of an engine collects garbage, and among all that torch and pytest have imported that took 0.12 s, a third
    of the time of tests that make many engines.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A test that trains in this process is rank 0 of 1, and leaves its process group."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and on a machine that has one a CUDA GPU: what holds on both is one test."""
    name: str = request.param
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
