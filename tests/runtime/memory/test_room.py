"""An accelerator's free memory is CUDA's and the unused part of torch's; what is given back is free to others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from dsrun.runtime.memory.room import free_bytes, give_cache_back

DEVICE = torch.device("cuda", 3)


class Allocator:
    """100 bytes are free; torch has 50, of which 30 are in use, and 45 were."""

    def __init__(self) -> None:
        self.emptied: list[torch.device] = []
        self._current = torch.device("cuda", 0)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return 100, 200

    def memory_reserved(self, device: torch.device) -> int:
        return 50

    def memory_allocated(self, device: torch.device) -> int:
        return 30

    def max_memory_allocated(self, device: torch.device) -> int:
        return 45

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        self._current = device
        return nullcontext()

    def empty_cache(self) -> None:
        self.emptied.append(self._current)


def test_what_torch_keeps_and_does_not_use_is_free() -> None:
    assert free_bytes(DEVICE, module=Allocator()) == 120
    assert free_bytes(DEVICE, at_peak=True, module=Allocator()) == 105


def test_the_cache_is_given_back_where_there_is_one() -> None:
    allocator = Allocator()
    give_cache_back(DEVICE, module=allocator)
    assert allocator.emptied == [DEVICE]
    give_cache_back(torch.device("cpu"))


@pytest.mark.cuda
def test_memory_that_a_tensor_has_let_go_of_is_free_and_then_free_to_others() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    give_cache_back(device)
    before, others_before = free_bytes(device), torch.cuda.mem_get_info(device)[0]
    tensor = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    assert before - free_bytes(device) >= 1 << 30
    del tensor
    torch.cuda.synchronize()
    near = 64 << 20  # what libraries may take meanwhile
    assert abs(free_bytes(device) - before) < near
    assert others_before - torch.cuda.mem_get_info(device)[0] >= 1 << 30
    give_cache_back(device)
    assert abs(torch.cuda.mem_get_info(device)[0] - others_before) < near
