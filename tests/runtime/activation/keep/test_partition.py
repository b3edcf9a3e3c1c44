"""Slices of what all ranks hold, gathered again: among threads, with counted bytes."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.activation.keep.host_ring import HostRing
from dsrun.runtime.activation.keep.keeper import AsItIs, Keeper
from dsrun.runtime.activation.keep.partition import PartitionKeeper
from dsrun.runtime.memory.bus import InstantBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.mesh.collectives import Collectives
from dsrun.runtime.mesh.loopback import LoopbackWorld


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(4, 6), (1,), (7, 5), (0, 3)])
def test_every_rank_gets_the_whole_again(size: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).t()

    def body(axis: Collectives) -> bool:
        ticket = PartitionKeeper(axis, AsItIs()).put(tensor)
        found = ticket.take()
        return torch.equal(found, tensor) and found.stride() == tensor.stride()

    assert LoopbackWorld(size).run(body) == [True] * size


def test_a_rank_keeps_its_share_and_enters_one_gather_a_take() -> None:
    tensor = torch.randn(64, 32)

    def body(axis: Collectives) -> tuple[int, int, int]:
        keeper = PartitionKeeper(axis, AsItIs())
        ticket = keeper.put(tensor)
        kept, before = keeper.device_bytes, axis.traffic.calls["all_gather"]
        ticket.take()
        return kept, before, axis.traffic.calls["all_gather"]

    assert LoopbackWorld(4).run(body) == [(tensor.nbytes // 4, 0, 1)] * 4


def test_slices_may_wait_in_the_ring() -> None:
    tensors = [torch.randn(10, 3) for _ in range(5)]

    def body(axis: Collectives) -> bool:
        ring: Keeper = HostRing(torch.device("cpu"), InstantBus(), pool=HostPool(None, say=print))
        tickets = [PartitionKeeper(axis, ring).put(tensor) for tensor in tensors]
        return all(
            torch.equal(ticket.take(), tensor) for ticket, tensor in zip(tickets[::-1], tensors[::-1], strict=True)
        )

    assert LoopbackWorld(2).run(body) == [True, True]
