"""Schedules of an engine's global batches: chunks that take turns are gathered, ahead where there is room."""

from __future__ import annotations

import pytest

from dsrun.pipeline_schedules.actions import Kind, Schedule
from dsrun.pipeline_schedules.generate import NAMES
from dsrun.runtime.engine.model.schedules import computations, evaluation_schedule, training_schedule

TWO_RANKS = (0, 1, 0, 1, 0, 1)


def computed(schedule: Schedule, rank: int = 0) -> str:
    """What a rank does, without messages and reductions."""
    shown = (Kind.FORWARD, Kind.BACKWARD, Kind.GATHER, Kind.DROP)
    return " ".join(str(action) for action in schedule.actions[rank] if action.kind in shown)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (0, "F0.0 F1.0 F0.2 F1.2 F0.4 F1.4 B0.4 B1.4 B0.2 B1.2 B0.0 B1.0"),
        (
            1,
            "G.0 F0.0 F1.0 D.0 G.2 F0.2 F1.2 D.2 G.4 F0.4 F1.4 B0.4 B1.4 D.4 G.2 B0.2 B1.2 D.2 G.0 B0.0 B1.0 D.0",
        ),
        (
            2,
            "G.0 F0.0 G.2 F1.0 D.0 F0.2 G.4 F1.2 D.2 F0.4 G.2 F1.4 B0.4 B1.4 D.4 B0.2 G.0 B1.2 D.2 B0.0 B1.0 D.0",
        ),
    ],
)
def test_a_batch_that_trains_gathers_as_many_chunks_as_there_is_room_for(sets: int, expected: str) -> None:
    assert computed(training_schedule("breadth_first", TWO_RANKS, 2, gather_sets=sets)) == expected


def test_a_model_that_is_not_cut_takes_any_schedule() -> None:
    for name in NAMES:
        assert " ".join(map(str, computations(name, (0,), 2).actions[0])).startswith("F0.0 ")


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (0, "F0.1 F1.1 F0.3 F1.3 F0.5 F1.5"),
        (1, "G.1 F0.1 F1.1 D.1 G.3 F0.3 F1.3 D.3 G.5 F0.5 F1.5 D.5"),
        (2, "G.1 F0.1 G.3 F1.1 D.1 F0.3 G.5 F1.3 D.3 F0.5 F1.5 D.5"),
    ],
)
def test_an_evaluation_does_so_too(sets: int, expected: str) -> None:
    made = evaluation_schedule(TWO_RANKS, 2, gather_sets=sets)
    assert computed(made, rank=1) == expected
    assert not any(action.kind is Kind.REDUCE for row in made.actions for action in row)
