"""Prices of long batches: what the simulation of every micro batch says, in a few rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from dsrun.errors import ConfigError, LayoutError
from dsrun.pipeline_schedules.actions import Action
from dsrun.pipeline_schedules.formulas import bubble_ratio
from dsrun.pipeline_schedules.generate import NAMES, ScheduleName, make_schedule
from dsrun.pipeline_schedules.long_batches import rounds_of, step_seconds
from dsrun.pipeline_schedules.simulate import Costs, equal_costs, simulate

IN_ROUNDS: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero_bubble", "zbv")
#: How chunks differ: by much, by little, not at all, by a few steps that make ties, or but for one.
DRAWS: tuple[Callable[[random.Random], float], ...] = (
    lambda draw: draw.random() + 0.1,
    lambda draw: 1 + draw.random() / 100,
    lambda _: 1 / 3,
    lambda draw: draw.randint(1, 4) / 4,
    lambda draw: draw.choice((1.0, 1.0, 1.0, 1.02)),
)


def chunks_of(name: ScheduleName, draw: random.Random) -> int:
    return 2 if name == "zbv" else draw.randint(1, 4) if name in ("interleaved", "breadth_first") else 1


def costs_of(chunks: int, draw: random.Random) -> Costs:
    """Costs of chunks: a third of them without a tie between a chunk's parts, others with what is computed again."""
    cost = draw.choice(DRAWS)
    forward = [cost(draw) for _ in range(chunks)]
    again = draw.choice((0.0, 0.5, 1.0, None))
    if again is None:
        inputs, weights = [cost(draw) for _ in forward], [cost(draw) for _ in forward]
    else:
        inputs, weights = [one * (1 + again) for one in forward], list(forward)
    return Costs(forward=forward, input_grads=inputs, weight_grads=weights, link=draw.choice((0.0, 0.0, 0.1, 0.7)))


def points(name: ScheduleName, count: int) -> Iterator[tuple[int, int, int, Costs]]:
    """Yields ranks, micro batches, chunks of a rank and costs: batches without rounds, with few, and long ones."""
    draw = random.Random(f"long batches of {name}")
    for number in range(count):
        ranks, virtual = draw.randint(2, 8), chunks_of(name, draw)
        each, fewest = (ranks if name == "interleaved" else 1), 3 * ranks
        few = (1, 2, 3, *range(fewest // each - 1, fewest // each + 4))
        micros = each * draw.choice((*few, draw.randint(fewest, 200) // each))
        if number % 8 == 0:
            micros = 512 // each * each
        yield ranks, micros, virtual, costs_of(ranks * virtual, draw)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_as_long_as_the_simulation_of_every_micro_batch_says(name: ScheduleName) -> None:
    for ranks, micros, virtual, costs in points(name, 48):
        made = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
        found = step_seconds(name, costs, ranks=ranks, micros=micros, virtual=virtual)
        assert found == pytest.approx(simulate(made, costs).seconds, rel=1e-9), (ranks, micros, virtual, costs)


@pytest.mark.parametrize("name", IN_ROUNDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_rows_are_a_beginning_rounds_and_an_end(name: ScheduleName, ranks: int) -> None:
    for virtual in (1, 2, 3, 4) if name == "interleaved" else (2,) if name == "zbv" else (1,):
        rounds = rounds_of(name, ranks, virtual)
        for count in (0, 1, 2, 5):
            micros = rounds.fewest + count * rounds.each
            made = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
            pieces = zip(rounds.beginning.actions, rounds.around.actions, rounds.end.actions, strict=True)
            for row, (beginning, around, end) in zip(made.actions, pieces, strict=True):
                rows = [*beginning]
                for number in range(count):
                    rows += shifted(around, number * rounds.each)
                rows += shifted(end, count * rounds.each)
                assert tuple(rows) == row, (virtual, count)


def shifted(row: tuple[Action, ...], by: int) -> Iterator[Action]:
    return (action._replace(micro=action.micro + by) for action in row)


@pytest.mark.parametrize(("name", "dear"), [("interleaved", 2), ("zbv", 3)])
def test_a_chunk_that_is_dearer_by_little_sets_the_pace_after_hundreds_of_micro_batches(
    name: ScheduleName, dear: int
) -> None:
    """Three short batches on one line prove nothing: another way through a batch is steeper, and longer much later."""
    chunks = [1.001 if chunk == dear else 1.0 for chunk in range(4)]
    costs = Costs(forward=chunks, input_grads=chunks, weight_grads=chunks)

    def seconds(micros: int) -> float:
        found = step_seconds(name, costs, ranks=2, micros=micros, virtual=2)
        made = make_schedule(name, ranks=2, micros=micros, virtual=2)
        assert found == pytest.approx(simulate(made, costs).seconds, rel=1e-9)
        return found

    for micros, pace in ((20, 6.0), (200, 6.0), (4000, 6.003)):
        assert seconds(micros + 2) - seconds(micros) == pytest.approx(2 * pace, abs=1e-8), micros


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micros", [9_999_984, 10**12 // 48 * 48])
def test_millions_of_micro_batches_wait_as_the_formula_says(name: ScheduleName, micros: int) -> None:
    virtual = 2 if name in ("interleaved", "breadth_first", "zbv") else 1
    costs = equal_costs(8 * virtual)
    found = step_seconds(name, costs, ranks=8, micros=micros, virtual=virtual)
    busy = 3 * virtual * micros
    waits = bubble_ratio(name, ranks=8, micros=micros, virtual=virtual) * busy
    assert found - busy == pytest.approx(waits, abs=1e-9 * busy)
    assert found - busy == pytest.approx(waits, abs=0.01)


def test_numbers_that_a_schedule_does_not_take_are_refused_by_their_own_value() -> None:
    with pytest.raises(ConfigError, match="`gradient_accumulation_steps` is 9999999; the schedule `interleaved`"):
        step_seconds("interleaved", equal_costs(8), ranks=4, micros=9_999_999, virtual=2)
    for name in ("1f1b", "gpipe"):
        for micros in (1, 100):
            with pytest.raises(LayoutError, match="forward has 3 chunks; expected 2"):
                step_seconds(name, equal_costs(3), ranks=2, micros=micros)


def test_what_costs_nothing_takes_no_time() -> None:
    for name in NAMES:
        virtual = 2 if name == "zbv" else 1
        free = equal_costs(4 * virtual, forward=0, input_grads=0, weight_grads=0)
        assert step_seconds(name, free, ranks=4, micros=4000, virtual=virtual) == 0
