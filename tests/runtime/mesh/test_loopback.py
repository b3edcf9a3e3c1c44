"""Threads as ranks: the first real error comes out, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest
import torch

from dsrun.contract.heartbeats import HeartbeatTable, HeartbeatWriter
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.wait_times import WaitTimes


def test_results_come_in_rank_order() -> None:
    assert LoopbackWorld(4).run(lambda c: (c.rank, c.size)) == [(rank, 4) for rank in range(4)]


def test_a_rank_that_raises_releases_the_others_and_its_error_comes_out() -> None:
    def body(collectives: LoopbackCollectives) -> None:
        if collectives.rank == 2:
            raise KeyError("rank 2")
        collectives.barrier()

    with pytest.raises(KeyError, match="rank 2"):
        LoopbackWorld(3).run(body)


def test_a_rank_that_stays_away_ends_the_others_wait() -> None:
    def body(collectives: LoopbackCollectives) -> None:
        if collectives.rank == 0:
            collectives.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(threading.BrokenBarrierError):
        LoopbackWorld(2, timeout_s=0.05).run(body)


def test_a_wait_is_named_by_the_collective_and_what_it_moves() -> None:
    table = HeartbeatTable(2)
    world = LoopbackWorld(2, observers=[WaitTimes(HeartbeatWriter(table.path, rank)) for rank in range(2)])

    def body(collectives: LoopbackCollectives) -> str:
        if collectives.rank == 1:
            # The other rank cannot leave before this one comes.
            beat = table.read(0)
            while beat is None or not beat.collective:
                beat = table.read(0)
            collectives.all_reduce(torch.zeros(1), label="mean loss").wait()
            return beat.collective
        collectives.all_reduce(torch.zeros(1), label="mean loss").wait()
        return ""

    assert world.run(body)[1] == "all_reduce sum of mean loss"
    ends = [table.read(rank) for rank in range(2)]
    assert [(end.collective, end.collectives) for end in ends if end is not None] == [("", 1), ("", 1)]
    table.close()
