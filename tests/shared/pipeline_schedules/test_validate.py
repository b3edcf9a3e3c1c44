"""Schedules proved: what can be run passes, and nothing that was changed does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest

from dsrun.errors import LayoutError
from dsrun.pipeline_schedules.actions import COMPUTES, Action, Kind, Schedule
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.generate import NAMES, make_schedule
from dsrun.pipeline_schedules.validate import live_of, problems_of, validate
from dsrun.pipeline_schedules.zero_actions import with_zero

Rows = list[list[Action]]
RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


def full(name: str, ranks: int, micros: int, virtual: int | None = None) -> Schedule:
    schedule = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
    return with_communication(with_zero(schedule, parameters="held"))


def rebuilt(schedule: Schedule, rows: Rows) -> Schedule:
    return Schedule(schedule.name, schedule.micros, schedule.rank_of, tuple(map(tuple, rows)))


def rows_of(schedule: Schedule) -> Rows:
    return [list(row) for row in schedule.actions]


def drop(schedule: Schedule, draw: random.Random) -> Schedule:
    rows = rows_of(schedule)
    row = draw.choice(rows)
    del row[draw.randrange(len(row))]
    return rebuilt(schedule, rows)


def double(schedule: Schedule, draw: random.Random) -> Schedule:
    rows = rows_of(schedule)
    row = draw.choice(rows)
    row.insert(draw.randrange(len(row) + 1), draw.choice(row))
    return rebuilt(schedule, rows)


def move(schedule: Schedule, draw: random.Random) -> Schedule:
    """Moves an action to another rank."""
    rows = rows_of(schedule)
    source, to = draw.sample(range(len(rows)), 2)
    action = rows[source].pop(draw.randrange(len(rows[source])))
    rows[to].insert(draw.randrange(len(rows[to]) + 1), action)
    return rebuilt(schedule, rows)


def swap_dependent(schedule: Schedule, draw: random.Random) -> Schedule:
    """Swaps two actions of one micro batch and chunk, each of which needs the one before."""
    rows = rows_of(schedule)
    row = draw.choice(rows)
    action = draw.choice([action for action in row if action.kind in COMPUTES])
    same = [at for at, other in enumerate(row) if (other.chunk, other.micro) == (action.chunk, action.micro)]
    # Two receives, and a send beside gradients of weights, need nothing of each other.
    free = (Kind.RECEIVE_BACKWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    pairs = [
        (first, second)
        for first, second in combinations(same, 2)
        if not (row[first].kind in free and row[second].kind in free)
        and (row[first].kind, row[second].kind) != (Kind.SEND_BACKWARD, Kind.WEIGHT_GRADS)
        and (row[first].kind, row[second].kind) != (Kind.FORWARD, Kind.RECEIVE_BACKWARD)
        and (row[first].kind, row[second].kind) != (Kind.RECEIVE_BACKWARD, Kind.FORWARD)
    ]
    first, second = draw.choice(pairs)
    row[first], row[second] = row[second], row[first]
    return rebuilt(schedule, rows)


def swap_micro_batches(schedule: Schedule, draw: random.Random) -> Schedule:
    """Swaps two computations of one kind and chunk, or the receives of two."""
    rows = rows_of(schedule)
    row = draw.choice(rows)
    kinds = (*COMPUTES, *RECEIVES)
    action = draw.choice([action for action in row if action.kind in kinds])
    same = [at for at, other in enumerate(row) if (other.kind, other.chunk) == (action.kind, action.chunk)]
    first, second = draw.sample(same, 2)
    row[first], row[second] = row[second], row[first]
    return rebuilt(schedule, rows)


def relabel(schedule: Schedule, draw: random.Random) -> Schedule:
    """Makes an action one of another micro batch, chunk or kind."""
    rows = rows_of(schedule)
    row = draw.choice(rows)
    at = draw.choice([at for at, action in enumerate(row) if action.kind in COMPUTES])
    action = row[at]
    others = [
        Action(action.kind, action.chunk, (action.micro + draw.randint(1, schedule.micros - 1)) % schedule.micros),
        Action(action.kind, (action.chunk + draw.randint(1, schedule.chunks - 1)) % schedule.chunks, action.micro),
        Action(draw.choice([kind for kind in COMPUTES if kind is not action.kind]), action.chunk, action.micro),
        Action(action.kind, schedule.chunks, action.micro),
        Action(action.kind, action.chunk, schedule.micros),
    ]
    row[at] = draw.choice(others)
    return rebuilt(schedule, rows)


def reduce_early(schedule: Schedule, draw: random.Random) -> Schedule:
    """Moves a reduction, a gather or a drop to where the chunk has still to compute, or already has."""
    rows = rows_of(schedule)
    row = draw.choice(rows)
    action = draw.choice([action for action in row if action.kind in (Kind.REDUCE, Kind.GATHER, Kind.DROP)])
    computes = [at for at, other in enumerate(row) if other.kind in COMPUTES and other.chunk == action.chunk]
    inside = draw.randint(computes[0] + 1, computes[-1])
    at = row.index(action)
    row.insert(inside, action)
    del row[at + 1 if inside <= at else at]
    return rebuilt(schedule, rows)


def exchange_rows(schedule: Schedule, draw: random.Random) -> Schedule:
    rows = rows_of(schedule)
    first, second = draw.sample(range(len(rows)), 2)
    rows[first], rows[second] = rows[second], rows[first]
    return rebuilt(schedule, rows)


CHANGES: tuple[Callable[[Schedule, random.Random], Schedule], ...] = (
    drop,
    double,
    move,
    swap_dependent,
    swap_micro_batches,
    relabel,
    reduce_early,
    exchange_rows,
)


def changed(count: int) -> Iterator[tuple[str, Schedule]]:
    draw = random.Random(22)
    schedules = [
        full(name, ranks, micros, virtual)
        for name in NAMES
        for ranks, micros, virtual in ((2, 4, None), (3, 6, None), (4, 8, None))
    ]
    schedules += [full(name, 3, 6, 2) for name in ("interleaved", "breadth_first")]
    for number in range(count):
        change = CHANGES[number % len(CHANGES)]
        schedule = draw.choice(schedules)
        made = change(schedule, draw)
        assert made != schedule, change.__name__
        yield f"{change.__name__} of {schedule.name}, {schedule.ranks} ranks", made


def test_1000_of_1000_changed_schedules_are_rejected() -> None:
    passed = [what for what, schedule in changed(1000) if not problems_of(schedule)]
    assert passed == []


@pytest.mark.parametrize("name", NAMES)
def test_claims_of_kept_micro_batches_are_proved_of_each_rank(name: str) -> None:
    schedule = full(name, 4, 8)
    live = live_of(schedule)
    assert problems_of(schedule, live=live) == []
    assert problems_of(schedule, live=max(live)) == []
    too_low = [live[0], live[1] - 1, *live[2:]]
    assert problems_of(schedule, live=too_low) == [
        f"rank 1 keeps {live[1]} forwards of chunks at once; claimed are {live[1] - 1}"
    ]


@pytest.mark.parametrize(
    ("name", "virtual", "live"),
    [
        ("gpipe", None, (8, 8, 8, 8)),
        ("1f1b", None, (4, 3, 2, 1)),
        ("interleaved", 2, (11, 9, 7, 5)),
        ("breadth_first", 2, (16, 16, 16, 16)),
        ("zero_bubble", None, (4, 4, 4, 4)),
        ("zbv", None, (8, 8, 8, 8)),
    ],
)
def test_kept_forwards_are_counted_until_the_gradients_of_weights(
    name: str, virtual: int | None, live: tuple[int, ...]
) -> None:
    assert live_of(make_schedule(name, ranks=4, micros=8, virtual=virtual)) == live


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    rows = rows_of(make_schedule("1f1b", ranks=2, micros=2))
    rows[0] = [rows[0][at] for at in (0, 2, 1, 3)]  # B0 of the first rank before its F1
    rows[1] = [rows[1][at] for at in (0, 2, 1, 3)]  # F1 of the last rank before its B0
    stuck = Schedule("odd", 2, (0, 1), tuple(map(tuple, rows)))
    assert problems_of(stuck) == [
        "B0.0 on rank 0 waits for ever for the gradients of chunk 1",
        "F1.1 on rank 1 waits for ever for the output of chunk 0",
    ]
    with pytest.raises(LayoutError, match=r"schedule odd: B0.0 on rank 0 waits for ever") as refused:
        validate(stuck)
    assert len(refused.value.problems) == 2


def test_lanes_of_bounded_capacity_are_proved() -> None:
    """Receives that are asked for only where they are needed leave all of a gpipe's messages under way."""
    schedule = with_communication(make_schedule("breadth_first", ranks=2, micros=4, virtual=2))
    assert problems_of(schedule, capacity=1) == []
    rows: Rows = []
    for row in schedule.actions:
        late: Rows = [[]]
        receives = {(a.kind, a.chunk, a.micro): a for a in row if a.kind in RECEIVES}
        for action in row:
            if action.kind in COMPUTES:
                kind = Kind.RECEIVE_FORWARD if action.kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
                late.append([a for a in [receives.get((kind, action.chunk, action.micro))] if a is not None])
            if action.kind not in RECEIVES:
                late[-1].append(action)
        rows.append([action for part in late for action in part])
    just_in_time = rebuilt(schedule, rows)
    assert problems_of(just_in_time) == []
    assert problems_of(just_in_time, capacity=3) == []
    assert any("to ask for one of the 1 messages under way" in text for text in problems_of(just_in_time, capacity=1))


def test_receives_in_another_order_than_the_sends_are_told() -> None:
    schedule = with_communication(make_schedule("gpipe", ranks=2, micros=3))
    rows = rows_of(schedule)
    first, second = [at for at, action in enumerate(rows[1]) if action.kind is Kind.RECEIVE_FORWARD][:2]
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    assert problems_of(rebuilt(schedule, rows))[-1] == (
        "rank 1 does not receive activations from rank 0 in the order in which they are sent"
    )


def test_numbers_that_are_none_of_a_schedule_are_told() -> None:
    row = (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0))
    assert problems_of(Schedule("odd", 1, (1,), (row,))) == ["chunk 0 is on rank 1 of 1"]
    assert problems_of(Schedule("odd", 0, (0,), (row,))) == ["it has 0 micro batches"]
    assert problems_of(Schedule("odd", 1, (0,), (row,))) == []
