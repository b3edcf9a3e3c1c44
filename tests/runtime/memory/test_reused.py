"""Page-locked memory of the last copies serves the next ones of the same size; pageable memory is not kept."""

from __future__ import annotations

import gc

import torch

from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.memory.page_lock import CudaLock
from dsrun.runtime.memory.reused import ReusedMemory
from support.fake_cuda import DEVICE, FakeCuda


def test_locked_memory_is_used_again_by_what_it_fits_until_it_is_dropped() -> None:
    cuda = FakeCuda()
    reused = ReusedMemory(HostPool(CudaLock(DEVICE, calls=cuda), say=print))
    first = reused.take(1000, dtype=torch.float32)
    address = first.data_ptr()
    reused.give_back(first)
    del first
    assert reused.spare_bytes == 4000
    other = reused.take(1000, dtype=torch.int32)
    assert other.data_ptr() != address, "of another dtype"
    again = reused.take(1000, dtype=torch.float32)
    assert again.data_ptr() == address
    assert (reused.spare_bytes, len(cuda.lock_threads)) == (0, 2)
    reused.give_back(again)
    del again
    reused.drop_spare()
    gc.collect()
    assert list(cuda.locked) == [other.data_ptr()]


def test_pageable_memory_goes_back_to_the_system() -> None:
    reused = ReusedMemory(HostPool(None, say=print))
    reused.give_back(reused.take(1000, dtype=torch.float32))
    assert reused.spare_bytes == 0
