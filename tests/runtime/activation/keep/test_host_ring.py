"""The ring: what is copied when, and that memory is used again. On the CPU, copies go to a second pool of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.runtime.activation.keep.host_ring import IN_FLIGHT, HostRing
from dsrun.runtime.memory.bus import InstantBus
from dsrun.runtime.memory.host_pool import HostPool

CPU = torch.device("cpu")
NUMEL = 1024


def tensors(count: int) -> list[Tensor]:
    return [torch.full((NUMEL,), float(i)) for i in range(count)]


def make() -> tuple[HostRing, InstantBus]:
    bus = InstantBus()
    return HostRing(CPU, bus, pool=HostPool(None, say=print)), bus


def test_all_leave_and_all_but_the_last_come_back_one_ahead() -> None:
    ring, bus = make()
    tickets = [ring.put(tensor) for tensor in tensors(6)]
    assert (bus.counts.out["activations"].calls, bus.counts.out_bytes) == (6, 6 * NUMEL * 4)
    assert ring.device_bytes == IN_FLIGHT * NUMEL * 4
    backs: list[int] = []
    for i in range(5, -1, -1):
        assert torch.equal(tickets[i].take(), torch.full((NUMEL,), float(i)))
        backs.append(bus.counts.back["activations"].calls)
        tickets.pop()
    # 5 and 4 have not left; from 4 on, each take starts the copy of the one before it.
    assert backs == [0, 1, 2, 3, 4, 4]
    assert ring.device_bytes == 0


def test_no_more_than_two_ahead_and_two_behind_are_on_the_device() -> None:
    ring, _ = make()
    tickets = [ring.put(tensor) for tensor in tensors(12)]
    while tickets:
        tickets[-1].take()
        assert ring.device_bytes <= IN_FLIGHT * NUMEL * 4
        tickets.pop()


def test_the_ring_stops_growing_after_the_first_step() -> None:
    ring, _ = make()
    sizes: list[int] = []
    for _step in range(4):
        tickets = [ring.put(tensor) for tensor in tensors(5)]
        while tickets:
            tickets.pop().take()
        sizes.append(ring.host_bytes)
    assert len(set(sizes)) == 1


def test_tickets_that_are_dropped_without_a_backward_give_their_slots_back() -> None:
    ring, _ = make()
    for _ in range(3):
        tickets = [ring.put(tensor) for tensor in tensors(4)]
        del tickets
    assert ring.host_bytes == 4 * NUMEL * 4
    assert ring.device_bytes == 0


def test_a_tensor_that_changes_after_it_was_put_comes_back_as_it_was() -> None:
    ring, _ = make()
    tensor = torch.ones(NUMEL)
    ticket = ring.put(tensor)
    tensor.zero_()
    assert torch.equal(ticket.take(), torch.ones(NUMEL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_dtypes_shapes_and_strides_come_back(dtype: torch.dtype) -> None:
    ring, _ = make()
    tensor = torch.randint(0, 2, (5, 7, 3)).to(dtype).transpose(0, 2)
    tickets = [ring.put(tensor), *(ring.put(other) for other in tensors(3))]
    found = tickets[0].take()
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (dtype, tensor.stride())


def test_taking_twice_gives_the_same_twice() -> None:
    ring, _ = make()
    tickets = [ring.put(tensor) for tensor in tensors(4)]
    assert torch.equal(tickets[0].take(), tickets[0].take())


def test_memory_that_a_copy_still_writes_is_let_go_when_the_copy_is_done_whatever_stream_lets_it_go() -> None:
    waited: list[int] = []

    class Back:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waited.append(self.number)

    class Bus(InstantBus):
        started = 0

        def start_back(self, host_N: Tensor, target_N: Tensor, **more: Any) -> Back:
            super().start_back(host_N, target_N, **more)
            self.started += 1
            return Back(self.started)

    ring = HostRing(CPU, Bus(), pool=HostPool(None, say=print))
    tickets = [ring.put(tensor) for tensor in tensors(6)]
    tickets[3].take()  # and with it the copy of the one before begins
    assert waited == []
    tickets.clear()
    assert waited == [2]
    assert ring.device_bytes == 0
