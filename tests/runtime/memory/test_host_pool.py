"""Host memory is zero, takes what was asked for, is locked where that works, and says so once where it does not."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import warnings
from collections.abc import Callable

import pytest
import torch

from dsrun.runtime.memory.host_pool import HostPool, available_bytes, host_pool_for
from dsrun.runtime.memory.page_lock import CannotLock
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


def _no_unlock() -> None:
    """Of a lock that does nothing."""


def _locks(address: int, nbytes: int) -> Callable[[], object]:
    return _no_unlock


def _refuses(address: int, nbytes: int) -> Callable[[], object]:
    raise CannotLock("cudaHostRegister: out of memory")


def _is_mapped(memory: torch.Tensor) -> bool:
    """Whether this process has memory where the parent has a tensor; does not touch it."""
    with open("/proc/self/maps") as file:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in file]
    return any(start <= memory.data_ptr() < stop for start, stop in spans)


def _asked_in_a_fork(question: Callable[[], bool]) -> bool:
    """Returns what a forked child answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if not child:
        answer = 2
        try:
            answer = int(question())
        finally:
            os._exit(answer)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"the child ended with {code}"
    return code == 1


def _inherited() -> None:
    locked, plain = HostPool(_locks, say=print), HostPool(None, say=print)
    refused = HostPool(_refuses, say=lambda text: None)
    mine = locked.zeros(1 << 20, dtype=torch.float32).fill_(3)
    others = [pool.zeros(1 << 20, dtype=torch.float32).fill_(3) for pool in (plain, refused)]
    assert not _asked_in_a_fork(lambda: _is_mapped(mine)), "what is locked is the parent's alone"
    assert _asked_in_a_fork(lambda: all(bool((memory == 3).all()) for memory in others))
    assert bool((mine == 3).all())


def test_a_fork_inherits_what_is_not_locked_alone() -> None:
    run_ranks(1, _inherited)


def _let_go_in_a_fork() -> None:
    unlocked: list[int] = []

    def lock(address: int, nbytes: int) -> Callable[[], object]:
        return lambda: unlocked.append(address)

    pool = HostPool(lock, say=print)
    kept = [pool.zeros(64 << 20, dtype=torch.uint8)]
    address = kept[0].data_ptr()

    def lets_go() -> bool:
        # Something else comes to lie where the memory was: a fork that let go of that memory must not unmap it.
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        fixed_no_replace = 0x100000
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_no_replace
        assert libc.mmap(address, 64 << 20, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        other = (ctypes.c_char * (64 << 20)).from_address(address)
        other[0] = b"x"
        kept.clear()
        gc.collect()
        with open("/proc/self/maps") as file:
            return any(line.startswith(f"{address:x}-") for line in file) and other[0] == b"x" and not unlocked

    assert _asked_in_a_fork(lets_go)
    kept.clear()
    gc.collect()
    assert unlocked == [address]


def test_a_fork_neither_unlocks_nor_unmaps_what_it_has_not_inherited() -> None:
    run_ranks(1, _let_go_in_a_fork)


def _written_behind_a_fork() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool = host_pool_for(device, pin=True, say=pytest.fail)
    memory = pool.zeros(1 << 28, dtype=torch.float32).fill_(1)
    assert memory.is_pinned()
    ask, answer = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            with open("/proc/self/smaps") as file:
                private = sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))
            os.write(answer[1], private.to_bytes(8, "little"))
            os.close(ask[1])
            os.read(ask[0], 1)  # ends with the parent's end of the pipe
        finally:
            os._exit(0)
    os.close(ask[0])
    os.close(answer[1])
    told = os.read(answer[0], 8)
    assert len(told) == 8, "the child has not told how much it has"
    private = int.from_bytes(told, "little")
    values = torch.arange(memory.numel(), dtype=torch.float32)
    memory.copy_(values)
    there = memory.to(device, non_blocking=True)
    torch.cuda.synchronize()
    os.close(ask[1])
    os.waitpid(child, 0)
    assert torch.equal(there.cpu(), values)
    assert private < 1 << 29, "the child has copies of what is locked"


@pytest.mark.cuda
@pytest.mark.gpu_seconds(6)
def test_what_is_written_behind_a_fork_is_what_the_device_reads() -> None:
    run_ranks(1, _written_behind_a_fork)


def test_free_memory_is_told() -> None:
    assert available_bytes() > 1 << 20
