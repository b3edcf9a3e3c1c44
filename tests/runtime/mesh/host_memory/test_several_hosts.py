"""Ranks of several hosts get the bits that they would get on one host, whoever is where."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.errors import DsrunError
from dsrun.runtime.mesh.collectives import Collectives, own_slice
from dsrun.runtime.mesh.host_memory.collectives import SharedMemoryCollectives
from dsrun.runtime.mesh.host_memory.several_hosts import HierarchicalCollectives, carrier_of
from dsrun.runtime.mesh.join.groups import join, make_mesh
from dsrun.runtime.mesh.join.shared_groups import GroupKey, SharedGroups
from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.mesh.step_position import Where
from support.ranks import run_ranks, wait_for_all
from support.wait_seconds import WaitSeconds

CPU = torch.device("cpu")
PLACES = {
    "two and two": [[0, 1], [2, 3]],
    "three and one": [[0, 1, 2], [3]],
    "one by one": [[0], [1], [2], [3]],
    "in turns": [[0, 2], [1, 3]],
}
#: Elements a rank, in fp32 and bf16: small sums, one piece, and many pieces with a rest.
NUMELS = (5, 20_000, 350_001)


def digest(*tensors: Tensor) -> str:
    parts = (tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def results(axis: Collectives, numel: int, dtype: torch.dtype, *, shared: bool) -> list[str]:
    """What every collective gives this rank; two and three of them are under way at once."""
    rank, size = axis.rank, axis.size

    def values(seed: int, count: int) -> Tensor:
        made = axis.zeros(count, dtype=dtype, device=CPU) if shared else torch.empty(count, dtype=dtype)
        return made.copy_(torch.randn(count, generator=torch.Generator().manual_seed(seed)))

    gathered, scattered = values(0, numel * size), values(rank, numel * size)
    summed, largest, sent = values(10 + rank, numel + 3), values(20 + rank, numel), values(30 + rank, numel)
    reduction = axis.reduce_scatter(scattered, label="unit 1")
    gather = axis.all_gather(gathered, values(40 + rank, numel), label="unit 2")
    gather.wait()
    reduction.wait()
    reduction.wait()
    works = [axis.all_reduce(summed), axis.all_reduce(largest, op="max"), axis.broadcast(sent, source=size - 2)]
    works[2].wait()
    works[0].wait()
    dealt = torch.empty_like(gathered)
    axis.all_to_all(dealt, gathered).wait()
    axis.barrier()
    return [
        digest(gathered),
        digest(own_slice(scattered, rank=rank, size=size)),
        *(digest(each) for each in (summed, largest, sent, dealt)),
        repr((dict(axis.traffic.calls), dict(axis.traffic.bytes))),
    ]


def inside(groups: SharedGroups, hosts: list[list[int]]) -> dist.ProcessGroup:
    """The ranks on this one's host, of all ranks of the job."""
    here = next(tuple(host) for host in hosts if dist.get_rank() in host)
    return groups.take(GroupKey("gloo", "host", here), [here])


def _everywhere(dtype: torch.dtype) -> dict[str, list[list[str]]]:
    """Results by place of the ranks; `one host` is all of them sharing memory."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=60)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    groups = SharedGroups(timeout_s=60)
    found: dict[str, list[list[str]]] = {}
    for name, hosts in [("one host", [[0, 1, 2, 3]]), *PLACES.items()]:
        found[name] = []
        for number, numel in enumerate(NUMELS):
            axis = (
                SharedMemoryCollectives(group, timeout_s=60)
                if len(hosts) == 1
                else HierarchicalCollectives(group, inside=inside(groups, hosts), hosts=hosts, timeout_s=60)
            )
            found[name].append(results(axis, numel, dtype, shared=number != 1))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hosts_give_the_bits_of_one_host_and_of_loopback(dtype: torch.dtype) -> None:
    ranks = run_ranks(4, _everywhere, dtype)
    for number, numel in enumerate(NUMELS):
        loopback = LoopbackWorld(4).run(lambda axis, n=numel: results(axis, n, dtype, shared=False))
        for rank, found in enumerate(ranks):
            for place, got in found.items():
                assert got[number] == loopback[rank], (place, numel, rank)


def test_what_a_rank_sends_is_received_by_its_counterpart() -> None:
    hosts = [[0, 1, 2], [3], [4, 5]]
    assert [carrier_of(rank, hosts[1], hosts) for rank in (0, 1, 2, 4, 5)] == [3] * 5
    assert [carrier_of(rank, hosts[2], hosts) for rank in (0, 1, 2, 3)] == [4, 5, 4, 4]
    assert [carrier_of(rank, hosts[0], hosts) for rank in (3, 4, 5)] == [0, 0, 1]


def _two_hosts(how: str) -> str:
    info = RankInfo.from_env()
    wait_for_all(info)
    join(info, backend="gloo", device=CPU, timeout_s=2)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    where = Where()
    hosts = [[0], [1]]
    own = inside(SharedGroups(timeout_s=2), hosts)
    axis = HierarchicalCollectives(group, inside=own, hosts=hosts, timeout_s=2, where=where)
    where.at(7, 1)
    if how == "leaves" and info.rank == 1:
        axis.close()
        return ""
    if how == "other step" and info.rank == 1:
        where.at(8, 1)
    with pytest.raises(DsrunError) as caught:
        axis.all_gather(torch.zeros(8), torch.zeros(4), label="unit 4").wait()
    return str(caught.value)


@pytest.mark.depends_on_speed("a time-out of 2 s")
def test_a_host_whose_rank_has_left_is_named() -> None:
    text = run_ranks(2, _two_hosts, "leaves")[0]
    assert text.startswith(
        "rank 0 waited in all_gather of unit 4, for rank 1, at step 7, micro step 1, which not all ranks joined: "
        "rank 1 has left the job at step 7, micro step 1 ("
    )


@pytest.mark.depends_on_speed("a time-out of 2 s")
def test_ranks_of_hosts_in_other_steps_find_each_other_within_the_time_out() -> None:
    zero, one = run_ranks(2, _two_hosts, "other step")
    assert "rank 1 waited in all_gather of unit 4, for rank 1, at" not in zero
    assert "rank 1 waited in all_gather of unit 4, for rank 0, at step 8, micro step 1" in zero
    assert "rank 0 waited in all_gather of unit 4, for rank 1, at step 7, micro step 1" in one


def _chosen() -> tuple[str, Any]:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    axis = make_mesh(divide(2, {}), info, device=CPU).world
    return type(axis).__name__, axis.size


def test_ranks_of_one_host_take_shared_memory_alone() -> None:
    assert run_ranks(2, _chosen) == [("SharedMemoryCollectives", 2)] * 2


def _late() -> float:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    seconds = WaitSeconds()
    hosts = [[0], [1]]
    own = inside(SharedGroups(timeout_s=30), hosts)
    axis = HierarchicalCollectives(group, seconds, inside=own, hosts=hosts, timeout_s=30)
    axis.barrier()
    before_s = seconds.waited_s
    if info.rank == 1:
        time.sleep(0.2)  # its own work
    axis.all_reduce(torch.zeros(100_000), label="unit 3").wait()
    return seconds.waited_s - before_s


@pytest.mark.depends_on_speed("a rank that comes 200 ms late waits less than 100 ms")
def test_a_rank_counts_the_seconds_for_which_it_waits_for_another_host() -> None:
    zero, one = run_ranks(2, _late)
    assert zero > 0.15
    assert one < 0.1
