"""The late collectives give what others give, no sooner than they are waited for, and tell who did not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from support.late_collectives import LateWorld, RaceError

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.cuda)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
pytestmark = pytest.mark.gpu_seconds(0.1)


def _filled(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(numel, generator=generator) * 40).to(dtype).to(device)


def _of_all(axis: LoopbackCollectives, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Results of every collective, in place and not; what is undefined is left out."""
    rank, size = axis.rank, axis.size
    shard = _filled(rank, 3, dtype, device)
    apart = torch.empty(3 * size, dtype=dtype, device=device)
    inside = _filled(rank, 3 * size, dtype, device)
    scattered, reduced, largest = (_filled(rank, 4 * size, dtype, device) for _ in range(3))
    told = _filled(rank, 5, dtype, device)
    send, receive = [q + 1 for q in range(size)], [rank + 1] * size
    uneven = torch.empty(sum(receive), dtype=dtype, device=device)
    pending = [
        axis.all_gather(apart, shard),
        axis.all_gather(inside, inside[3 * rank : 3 * rank + 3]),
        axis.reduce_scatter(scattered),
        axis.all_reduce(reduced),
        axis.all_reduce(largest, op="max"),
        axis.broadcast(told, source=size - 1),
        axis.all_to_all(
            uneven, _filled(rank, sum(send), dtype, device), receive_numels=receive, send_numels=send, label="rows"
        ),
    ]
    for work in pending:
        work.wait()
    own = scattered[4 * rank : 4 * rank + 4]
    return [result.cpu() for result in (apart, inside, own, reduced, largest, told, uneven)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES, ids=["cpu", "cuda"])
def test_results_are_those_of_ranks_that_do_not_wait(device: torch.device, dtype: torch.dtype, size: int) -> None:
    world = LateWorld(size, device=device)
    late = world.run(lambda axis: _of_all(axis, dtype, device))
    assert world.unwaited == []
    for found, expected in zip(late, LoopbackWorld(size).run(lambda axis: _of_all(axis, dtype, CPU)), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("device", DEVICES, ids=["cpu", "cuda"])
def test_a_result_is_nan_until_it_is_waited_for_and_what_is_undefined_stays_it(device: torch.device, size: int) -> None:
    def body(axis: LoopbackCollectives) -> None:
        gathered, summed = torch.ones(2 * size, device=device), torch.ones(2 * size, device=device)
        works = axis.all_gather(gathered, torch.ones(2, device=device)), axis.reduce_scatter(summed)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        assert bool(gathered.isnan().all())
        assert bool(summed.isnan().all())
        for work in works:
            work.wait()
        assert gathered.tolist() == [1.0] * 2 * size
        undefined = torch.ones(2 * size, dtype=torch.bool)
        undefined[2 * axis.rank : 2 * axis.rank + 2] = False
        assert torch.equal(summed.isnan().cpu(), undefined)

    LateWorld(size, device=device).run(body)


@pytest.mark.cuda
def test_on_cuda_a_wait_stops_no_host_and_orders_the_current_stream_alone() -> None:
    device = torch.device("cuda", 0)
    elsewhere = torch.cuda.Stream(device)  # of both runs, for the second is not to allocate memory there

    def body(axis: LoopbackCollectives) -> tuple[bool, bool, list[float]]:
        gathered = torch.ones(4, device=device)
        axis.all_gather(gathered, torch.ones(4, device=device)).wait()
        has_ended = torch.cuda.current_stream(device).record_event().query()
        with torch.cuda.stream(elsewhere):
            early = gathered.isnan().all()
        elsewhere.synchronize()
        return has_ended, bool(early), gathered.tolist()

    LateWorld(1, device=device, cycles=1).run(body)  # loads the kernels, for which CUDA may stop the host
    torch.cuda.synchronize(device)
    assert LateWorld(1, device=device, cycles=200_000_000).run(body) == [(False, True, [1.0] * 4)]


def _writes(change: Callable[[Tensor, Tensor], Any]) -> None:
    def body(axis: LoopbackCollectives) -> None:
        gathered, shard = torch.ones(4), torch.ones(2)
        work = axis.all_gather(gathered, shard, label="unit 3")
        if axis.rank == 1:
            change(gathered, shard)
        work.wait()

    LateWorld(2).run(body)


def test_who_writes_what_is_read_or_overwritten_before_the_wait_is_told_so() -> None:
    with pytest.raises(RaceError, match="rank 1: what all_gather of unit 3 overwrites was written"):
        _writes(lambda gathered, shard: gathered.zero_())
    with pytest.raises(RaceError, match="rank 1: what all_gather of unit 3 reads was written"):
        _writes(lambda gathered, shard: shard.zero_())
    _writes(lambda gathered, shard: shard.add_(0.0))


def test_a_collective_that_a_rank_does_not_wait_for_is_named() -> None:
    def body(axis: LoopbackCollectives) -> None:
        works = axis.all_reduce(torch.ones(2), label="one"), axis.all_reduce(torch.ones(2), label="two")
        works[0].wait()
        if axis.rank == 0:
            works[1].wait()

    world = LateWorld(2)
    world.run(body)
    assert world.unwaited == ["all_reduce sum of two"]


def test_ranks_in_other_collectives_are_refused_and_one_that_fails_releases_the_others() -> None:
    def crossed(axis: LoopbackCollectives) -> None:
        axis.all_reduce(torch.ones(2), label=f"unit {axis.rank}").wait()

    with pytest.raises(ModelError, match="is in all_reduce sum of unit"):
        LateWorld(2).run(crossed)

    def fails(axis: LoopbackCollectives) -> None:
        if axis.rank == 1:
            raise KeyError("rank 1")
        axis.all_reduce(torch.ones(2)).wait()

    with pytest.raises(KeyError, match="rank 1"):
        LateWorld(2).run(fails)
    with pytest.raises(threading.BrokenBarrierError):
        LateWorld(2, timeout_s=0.05).run(lambda axis: axis.rank or axis.all_reduce(torch.ones(2)).wait())
