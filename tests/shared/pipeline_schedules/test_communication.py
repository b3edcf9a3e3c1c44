"""Messages of schedules: each once, in one order on both sides, asked for ahead."""

from __future__ import annotations

import pytest

from dsrun.pipeline_schedules.actions import COMPUTES, Action, Kind, Schedule
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.generate import NAMES, make_schedule
from dsrun.pipeline_schedules.validate import problems_of

SENDS = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD, Kind.INPUT_GRADS: Kind.SEND_BACKWARD}
RECEIVES = {
    Kind.FORWARD: Kind.RECEIVE_FORWARD,
    Kind.BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.INPUT_GRADS: Kind.RECEIVE_BACKWARD,
}


def test_a_schedule_of_two_ranks_reads_as_expected() -> None:
    made = with_communication(make_schedule("1f1b", ranks=2, micros=2))
    assert [" ".join(map(str, row)) for row in made.actions] == [
        "F0.0 SF0.0 RB0.0 F1.0 SF1.0 RB1.0 B0.0 B1.0",
        "RF0.1 F0.1 RF1.1 B0.1 SB0.1 F1.1 B1.1 SB1.1",
    ]


@pytest.mark.parametrize("capacity", [1, 2, None])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_come_to_their_ends_with_one_message_under_way(name: str, ranks: int, capacity: int | None) -> None:
    for micros in (ranks, 2 * ranks, 3 * ranks):
        for virtual in (1, 2, 3) if name in ("interleaved", "breadth_first") else (None,):
            made = with_communication(make_schedule(name, ranks=ranks, micros=micros, virtual=virtual))
            assert problems_of(made, capacity=capacity) == []


@pytest.mark.parametrize("name", NAMES)
def test_sends_stand_directly_behind_and_receives_a_computation_ahead(name: str) -> None:
    schedule = make_schedule(name, ranks=4, micros=8)
    for rank, row in enumerate(with_communication(schedule).actions):
        computes = [index for index, action in enumerate(row) if action.kind in COMPUTES]
        for number, index in enumerate(computes):
            action = row[index]
            forward = action.kind is Kind.FORWARD
            if action.kind is Kind.WEIGHT_GRADS:
                continue
            step = 1 if forward else -1
            to, source = action.chunk + step, action.chunk - step
            if 0 <= to < schedule.chunks and schedule.rank_of[to] != rank:
                assert row[index + 1] == Action(SENDS[action.kind], action.chunk, action.micro)
            if 0 <= source < schedule.chunks and schedule.rank_of[source] != rank:
                asked = row.index(Action(RECEIVES[action.kind], action.chunk, action.micro))
                assert asked < computes[max(0, number - 1)]


@pytest.mark.parametrize("name", NAMES)
def test_computations_stay_as_they_are(name: str) -> None:
    schedule = make_schedule(name, ranks=3, micros=6)
    made = with_communication(schedule)
    assert tuple(tuple(a for a in row if a.kind in COMPUTES) for row in made.actions) == schedule.actions


def test_neighbouring_chunks_of_one_rank_send_nothing() -> None:
    made = with_communication(make_schedule("zbv", ranks=2, micros=4))
    last = made.actions[1]  # has chunks 1 and 2
    assert not [a for a in last if (a.kind, a.chunk) in ((Kind.SEND_FORWARD, 1), (Kind.RECEIVE_FORWARD, 2))]
    assert not [a for a in last if (a.kind, a.chunk) in ((Kind.SEND_BACKWARD, 2), (Kind.RECEIVE_BACKWARD, 1))]
    (alone,) = with_communication(make_schedule("interleaved", ranks=1, micros=2, virtual=3)).actions
    assert {action.kind for action in alone} == {Kind.FORWARD, Kind.BACKWARD}


def test_receives_follow_the_sends_where_they_are_needed_in_another_order() -> None:
    """Rank 0 makes both of its chunks' outputs in one order; rank 1 needs them in the other."""
    first = (Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1))
    then = (Action(Kind.FORWARD, 2, 0), Action(Kind.FORWARD, 2, 1))
    schedule = Schedule(
        "odd",
        2,
        (0, 1, 0, 1),
        (
            (first[0], then[0], first[1], then[1]),
            (
                Action(Kind.FORWARD, 1, 0),
                Action(Kind.FORWARD, 1, 1),
                Action(Kind.FORWARD, 3, 0),
                Action(Kind.FORWARD, 3, 1),
            ),
        ),
    )
    row = with_communication(schedule).actions[1]
    asked = [(action.chunk, action.micro) for action in row if action.kind is Kind.RECEIVE_FORWARD]
    assert asked == [(1, 0), (3, 0), (1, 1), (3, 1)], "the order of rank 0's sends"
