"""ZeRO between computations: parameters there where they are used, gradients reduced behind the last ones."""

from __future__ import annotations

import pytest

from dsrun.errors import ConfigError
from dsrun.pipeline_schedules.actions import Action, Kind
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.generate import NAMES, make_schedule
from dsrun.pipeline_schedules.validate import problems_of
from dsrun.pipeline_schedules.zero_actions import with_zero


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_before_or_behind_messages_it_can_be_run(name: str, ranks: int) -> None:
    schedule = make_schedule(name, ranks=ranks, micros=8)
    for made in (
        with_communication(with_zero(schedule, parameters="held")),
        with_zero(with_communication(schedule), parameters="held"),
        with_zero(schedule, parameters="never"),
    ):
        assert problems_of(made, capacity=1) == []


@pytest.mark.parametrize("name", NAMES)
def test_held_gathers_each_chunk_once_and_reduces_it_once(name: str) -> None:
    made = with_zero(make_schedule(name, ranks=4, micros=8), parameters="held")
    for rank, row in enumerate(made.actions):
        for kind in (Kind.GATHER, Kind.DROP, Kind.REDUCE):
            assert sorted(a.chunk for a in row if a.kind is kind) == list(made.chunks_of(rank))


def test_breadth_first_gathers_in_phases_twice_and_once_where_they_meet() -> None:
    made = with_zero(make_schedule("breadth_first", ranks=2, micros=2, virtual=2), parameters="phases")
    assert " ".join(map(str, made.actions[0])) == (
        "G.0 F0.0 F1.0 D.0 G.2 F0.2 F1.2 B0.2 B1.2 R.2 D.2 G.0 B0.0 B1.0 R.0 D.0"
    )
    assert problems_of(with_communication(made), capacity=1) == []


def test_a_chunk_is_gathered_ahead_while_the_one_before_it_computes() -> None:
    made = with_zero(make_schedule("breadth_first", ranks=2, micros=2, virtual=3), parameters="phases", ahead=True)
    assert " ".join(map(str, made.actions[0])) == (
        "G.0 F0.0 G.2 F1.0 D.0 F0.2 G.4 F1.2 D.2 F0.4 G.2 F1.4 B0.4 B1.4 R.4 D.4 "
        "B0.2 G.0 B1.2 R.2 D.2 B0.0 B1.0 R.0 D.0"
    )
    for row in made.actions:
        there, most = 0, 0
        for action in row:
            there += (action.kind is Kind.GATHER) - (action.kind is Kind.DROP)
            most = max(most, there)
        assert (there, most) == (0, 2)
    for one in (with_communication(made), made):
        assert problems_of(one, capacity=1) == []


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble", "zbv"])
def test_schedules_without_phases_are_refused_by_name(name: str) -> None:
    virtual = 2 if name == "interleaved" else None
    with pytest.raises(ConfigError, match=f"`pipeline.schedule` is {name}; chunk 0 has its forwards") as refused:
        with_zero(make_schedule(name, ranks=2, micros=8, virtual=virtual), parameters="phases")
    assert refused.value.hint == "take the schedule breadth_first, or ZeRO stage 1"


def test_a_reduction_stands_behind_the_send_that_another_rank_waits_for() -> None:
    schedule = make_schedule("1f1b", ranks=2, micros=2)
    for made in (
        with_communication(with_zero(schedule, parameters="never")),
        with_zero(with_communication(schedule), parameters="never"),
    ):
        assert made.actions[1][-3:] == (
            Action(Kind.BACKWARD, 1, 1),
            Action(Kind.SEND_BACKWARD, 1, 1),
            Action(Kind.REDUCE, 1),
        )


def test_nothing_is_added_that_nobody_asked_for() -> None:
    schedule = make_schedule("interleaved", ranks=2, micros=4, virtual=2)
    assert with_zero(schedule, parameters="never", reduces=False) == schedule
