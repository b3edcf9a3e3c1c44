"""Loopback threads and Gloo give the same numbers as a plain computation, and count the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.c10d import C10dCollectives, GlooCollectives
from dsrun.runtime.mesh.collectives import Collectives, own_slice
from dsrun.runtime.mesh.join.groups import join, make_mesh
from dsrun.runtime.mesh.loopback import LoopbackWorld
from support.ranks import run_ranks

SHARD = 6


def buffer_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHARD * size, generator=generator).to(dtype)


def exercise(collectives: Collectives, dtype: torch.dtype) -> dict[str, Any]:
    """Every collective once or twice; what this rank may read afterwards."""
    rank, size = collectives.rank, collectives.size
    found: dict[str, Any] = {}
    mine = buffer_of(rank, size, dtype)

    into = torch.full((SHARD * size,), 7.0, dtype=dtype)
    shard = mine[:SHARD].clone()
    collectives.all_gather(into, shard).wait()
    found["gathered"], found["shard after"] = into, shard

    inside = torch.zeros(SHARD * size + 2, dtype=dtype)  # with a guard on both sides
    output = inside.narrow(0, 1, SHARD * size)
    own_slice(output, rank=rank, size=size).copy_(mine[:SHARD])
    collectives.all_gather(output, own_slice(output, rank=rank, size=size)).wait()
    found["gathered in place"] = inside

    scattered = mine.clone()
    collectives.reduce_scatter(scattered).wait()
    found["scattered"] = own_slice(scattered, rank=rank, size=size).clone()
    for op in ("sum", "max"):
        reduced = mine.clone()
        handle = collectives.all_reduce(reduced, op=op)
        handle.wait()
        handle.wait()
        found[op] = reduced
    sent = mine.clone()
    collectives.broadcast(sent, source=size - 1).wait()
    found["sent"] = sent
    dealt = torch.full_like(mine, 7.0)
    collectives.all_to_all(dealt, mine).wait()
    found["dealt"] = dealt
    # Rank q has q + r + 1 elements for rank r, and so nothing in common with even parts.
    send = [rank + to + 1 for to in range(size)]
    uneven = torch.full((sum(send),), 7.0, dtype=dtype)
    source = torch.arange(sum(send)).add(100 * rank).to(dtype)
    collectives.all_to_all(uneven, source, receive_numels=send, send_numels=send).wait()
    found["dealt unevenly"] = uneven
    collectives.barrier()
    found["calls"], found["bytes"] = dict(collectives.traffic.calls), dict(collectives.traffic.bytes)
    return found


def check(results: list[dict[str, Any]], dtype: torch.dtype) -> None:
    size = len(results)
    buffers = [buffer_of(rank, size, dtype) for rank in range(size)]
    gathered = torch.cat([buffer[:SHARD] for buffer in buffers])
    for rank, found in enumerate(results):
        assert torch.equal(found["gathered"], gathered)
        assert torch.equal(found["shard after"], buffers[rank][:SHARD])
        assert torch.equal(found["gathered in place"][1:-1], gathered)
        assert found["gathered in place"][0] == found["gathered in place"][-1] == 0
        exact = torch.stack(buffers).double().sum(0)
        tolerance = 1e-6 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(found["sum"].double(), exact, rtol=tolerance, atol=tolerance)
        assert torch.equal(found["sum"], results[0]["sum"]), "the same bits on every rank"
        assert torch.equal(found["scattered"], own_slice(found["sum"], rank=rank, size=size))
        assert torch.equal(found["max"], torch.stack(buffers).amax(0))
        assert torch.equal(found["sent"], buffers[-1])
        assert torch.equal(found["dealt"], torch.cat([own_slice(b, rank=rank, size=size) for b in buffers]))
        parts: list[Tensor] = []
        for peer in range(size):
            start = sum(peer + to + 1 for to in range(rank))
            parts.append(torch.arange(start, start + peer + rank + 1).add(100 * peer).to(dtype))
        assert torch.equal(found["dealt unevenly"], torch.cat(parts))
        calls = {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 2, "barrier": 1}
        assert found["calls"] == calls
        whole = SHARD * size * dtype.itemsize
        nbytes = {name: n * whole for name, n in calls.items() if name != "barrier"}
        nbytes["all_to_all"] = whole + found["dealt unevenly"].numel() * dtype.itemsize
        assert found["bytes"] == nbytes


def _on_gloo(dtype: torch.dtype) -> list[dict[str, Any]]:
    info = RankInfo.from_env()
    device = torch.device("cpu")
    join(info, backend="gloo", device=device, timeout_s=30)
    mesh = make_mesh(divide(info.world_size, {}), info, device=device)
    tuned = mesh.world
    assert isinstance(tuned, AloneCollectives if info.world_size == 1 else C10dCollectives)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    ways: list[Collectives] = [tuned, GlooCollectives(group), C10dCollectives(group)]
    return [exercise(way, dtype) for way in ways]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loopback_gloo_and_plain_computation_agree(size: int, dtype: torch.dtype) -> None:
    loopback = LoopbackWorld(size).run(lambda collectives: exercise(collectives, dtype))
    check(loopback, dtype)
    gloo = run_ranks(size, _on_gloo, dtype)
    for way in (0, 1, 2):
        check([rank[way] for rank in gloo], dtype)
    if size <= 2:  # of two terms there is one sum
        for ours, theirs in zip(loopback, gloo, strict=True):
            assert torch.equal(ours["sum"], theirs[0]["sum"])


def test_a_buffer_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        own_slice(torch.zeros(7), rank=0, size=2)
