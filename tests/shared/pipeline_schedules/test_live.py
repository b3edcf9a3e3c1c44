"""What ranks keep, beside a walk through each micro batch of every chunk."""

from __future__ import annotations

import pytest

from dsrun.pipeline_schedules.actions import Action, Kind, Schedule
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.generate import ScheduleName, make_schedule
from dsrun.pipeline_schedules.live import ONE_AT_A_TIME, LiveMoment, live_moments, most_live
from dsrun.pipeline_schedules.validate import live_of

GRID: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 1, 1, 5),
    ("1f1b", 4, 1, 8),
    ("1f1b", 4, 1, 3),
    ("gpipe", 3, 1, 6),
    ("interleaved", 2, 2, 4),
    ("interleaved", 4, 3, 8),
    ("breadth_first", 3, 2, 5),
    ("zero_bubble", 4, 1, 9),
    ("zbv", 3, 2, 7),
]
each_schedule = pytest.mark.parametrize(("name", "ranks", "virtual", "micros"), GRID)


def walk(schedule: Schedule, rank: int) -> list[LiveMoment]:
    """Returns what is kept in every action of a rank: by the state of each forward, one by one."""
    own = schedule.chunks_of(rank)
    states: dict[tuple[int, int], str] = {}

    def counted(state: str) -> tuple[int, ...]:
        return tuple(sum(s == state and key[0] == chunk for key, s in states.items()) for chunk in own)

    found: list[LiveMoment] = []
    for action in schedule.actions[rank]:
        key = (action.chunk, action.micro)
        if action.kind is Kind.FORWARD:
            states[key] = "live"
        elif action.kind is Kind.INPUT_GRADS:
            states[key] = "put off"
        runs = own.index(action.chunk) if action.kind is Kind.BACKWARD else None
        found.append(LiveMoment(counted("live"), counted("put off"), runs))
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADS):
            del states[key]
    return found


@each_schedule
def test_moments_are_those_of_a_walk_that_no_other_covers(
    name: ScheduleName, ranks: int, virtual: int, micros: int
) -> None:
    schedule = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
    for rank in range(ranks):
        found, every = live_moments(schedule, rank), walk(schedule, rank)
        assert set(found) <= set(every)
        assert all(any(moment.is_within(other) for other in found) for moment in every)
        assert not any(one.is_within(other) for one in found for other in found if one is not other)
        assert live_moments(with_communication(schedule), rank) == found


@each_schedule
def test_the_most_of_a_rank_counts_chunks_by_their_weights(
    name: ScheduleName, ranks: int, virtual: int, micros: int
) -> None:
    schedule = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
    weights = [3, 1, 2][:virtual]
    for rank, most in enumerate(live_of(schedule)):
        every = walk(schedule, rank)
        assert most == max(sum(m.counts) + sum(m.put_off) for m in every)
        assert most == max(sum(m.counts) + sum(m.put_off) for m in live_moments(schedule, rank))
        assert most_live(schedule, rank, weights) == max(
            sum(w * (live + late) for w, live, late in zip(weights, m.counts, m.put_off, strict=True)) for m in every
        )


def test_one_stage_keeps_one_micro_batch_at_a_time() -> None:
    assert live_moments(make_schedule("1f1b", ranks=1, micros=4, virtual=1), 0) == ONE_AT_A_TIME


def test_1f1b_keeps_one_less_on_each_stage() -> None:
    schedule = make_schedule("1f1b", ranks=4, micros=8, virtual=1)
    assert [live_moments(schedule, rank) for rank in range(4)] == [(LiveMoment((n,), (0,), 0),) for n in (4, 3, 2, 1)]


def test_what_waits_counts_from_the_end_of_the_backward_to_the_inputs_on() -> None:
    rows = tuple(Action(kind, 0, 0) for kind in (Kind.FORWARD, Kind.INPUT_GRADS, Kind.WEIGHT_GRADS))
    found = live_moments(Schedule("zero_bubble", 1, (0,), (rows,)), 0)
    assert found == (LiveMoment((1,), (0,), None), LiveMoment((0,), (1,), None))
