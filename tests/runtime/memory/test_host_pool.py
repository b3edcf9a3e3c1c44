"""Host memory is zero, takes what was asked for, is locked where that works, and says so once where it does not."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from dsrun.runtime.memory.host_pool import CannotLock, HostPool, available_bytes, host_pool_for
from support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 3000])
def test_memory_is_zero_and_can_be_written(dtype: torch.dtype, numel: int) -> None:
    said: list[str] = []
    pool = host_pool_for(CPU, pin=True, say=said.append)
    made = pool.zeros(numel, dtype=dtype)
    assert (made.dtype, made.shape, made.is_contiguous()) == (dtype, (numel,), True)
    assert not bool(made.any())
    made.fill_(2)
    assert bool((made == 2).all())
    assert not pool.pins, "the CPU copies from any memory"
    assert said == []


def _taken_and_given_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    pool = HostPool(None, say=print)
    before = resident()
    made = pool.zeros(32 << 20, dtype=torch.float32)
    assert resident() < before + (32 << 20)
    made.fill_(1)
    assert resident() > before + (120 << 20)
    part = made[5:7]
    del made
    gc.collect()
    assert resident() > before + (120 << 20), "a view holds it"
    del part
    gc.collect()
    assert resident() < before + (32 << 20)


def test_it_takes_room_as_it_is_written_and_gives_it_back_with_the_last_view() -> None:
    run_ranks(1, _taken_and_given_back)


def test_what_was_locked_is_unlocked_before_its_memory_goes() -> None:
    seen: list[str] = []

    def lock(address: int, nbytes: int) -> Callable[[], object]:
        seen.append(f"locked {nbytes}")
        return lambda: seen.append("unlocked")

    pool = HostPool(lock, say=print)
    made = pool.zeros(256, dtype=torch.float32)
    part = made[10:20].view(2, 5)
    assert seen == ["locked 1024"]
    del made
    gc.collect()
    assert seen == ["locked 1024"]
    del part
    gc.collect()
    assert seen == ["locked 1024", "unlocked"]


def test_memory_that_cannot_be_locked_is_pageable_and_one_line_says_why() -> None:
    def lock(address: int, nbytes: int) -> Callable[[], object]:
        raise CannotLock("cudaHostRegister: out of memory")

    said: list[str] = []
    pool = HostPool(lock, say=said.append)
    assert [pool.zeros(1 << 18, dtype=torch.float32).numel() for _ in range(2)] == [1 << 18] * 2
    assert len(said) == 1
    assert "1.0 MiB of host memory could not be page-locked (cudaHostRegister: out of memory; " in said[0]
    assert "`ulimit -l`" in said[0]


def test_free_memory_is_told() -> None:
    assert available_bytes() > 1 << 20
