"""Lanes take every element once, compute by themselves, and leave the process's threads as they were."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from dsrun.runtime.offload.step.lanes import Lanes

_DEADLINE_S = 60.0


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("numel", [0, 64, 1 << 14, (1 << 16) + 64])
def test_every_element_is_in_one_part(count: int, numel: int) -> None:
    taken = torch.zeros(numel, dtype=torch.int64)
    starts: list[int] = []

    def share(lane: int, first: int, last: int) -> None:
        assert 0 <= lane < count
        taken[first:last] += 1
        starts.append(first)

    Lanes(count).divide(numel, share)
    assert bool((taken == 1).all())
    assert all(first % 256 == 0 for first in starts)


def test_operations_of_a_lane_use_one_thread_and_those_of_others_as_many_as_before() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    lanes = Lanes(3)
    for _ in range(2):
        lanes.divide(1 << 16, lambda *_: seen.append(torch.get_num_threads()))
    assert seen == [1] * 6
    assert torch.get_num_threads() == before
    later: list[int] = []
    thread = Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join(_DEADLINE_S)
    assert later == [before]


def test_a_failure_is_raised_when_nobody_is_at_work_any_more() -> None:
    may_end = Event()
    ended: list[int] = []

    def share(lane: int, first: int, last: int) -> None:
        if lane == 1:
            assert may_end.wait(_DEADLINE_S)
            ended.append(lane)
            raise ValueError("the second lane")
        may_end.set()
        if lane == 0:
            raise ValueError("the first lane")

    with pytest.raises(ValueError, match="the first lane"):
        Lanes(2).divide(1 << 16, share)
    assert ended == [1]
