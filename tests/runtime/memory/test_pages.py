"""Fresh memory is zero, can be written, and takes room where it has been written only."""

from __future__ import annotations

import os

import pytest
import torch

from dsrun.runtime.memory.pages import fresh_zeros, give_freed_pages_back

MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 5000])
def test_it_is_zero_and_can_be_written(dtype: torch.dtype, numel: int) -> None:
    made = fresh_zeros(numel, dtype=dtype, device=torch.device("cpu"))
    assert (made.dtype, made.shape, made.is_contiguous()) == (dtype, (numel,), True)
    assert not bool(made.any())
    made.add_(3)
    assert bool((made == 3).all())


def test_pages_take_room_when_they_are_written_and_give_it_back_with_the_last_view() -> None:
    before = resident_bytes()
    made = fresh_zeros(256 * MIB, dtype=torch.uint8, device=torch.device("cpu"))
    assert resident_bytes() < before + 64 * MIB
    made[: 128 * MIB].fill_(1)
    assert before + 64 * MIB < resident_bytes() < before + 192 * MIB
    part = made[:10]
    del made
    assert resident_bytes() > before + 64 * MIB
    del part
    assert resident_bytes() < before + 64 * MIB


def test_what_small_tensors_have_freed_goes_back() -> None:
    held = [torch.ones(4096) for _ in range(128 * MIB // 16384)]
    full = resident_bytes()
    last = held.pop()  # at the top of the heap, which therefore cannot shrink by itself
    del held
    give_freed_pages_back()
    assert resident_bytes() < full - 64 * MIB
    assert bool(last.all())
