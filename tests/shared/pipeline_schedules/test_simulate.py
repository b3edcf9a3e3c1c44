"""Schedules in time: bubbles of the papers, the numbers of tables, links, unequal chunks."""

from __future__ import annotations

import random

import pytest

from dsrun.errors import LayoutError
from dsrun.pipeline_schedules.actions import Action, Kind, Schedule
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.formulas import bubble_ratio, half_interleaved_efficiency, live_micro_batches
from dsrun.pipeline_schedules.generate import NAMES, ScheduleName, make_schedule
from dsrun.pipeline_schedules.simulate import equal_costs, simulate
from dsrun.pipeline_schedules.validate import live_of, problems_of
from dsrun.pipeline_schedules.zero_actions import with_zero
from support.core_speed import core_seconds


def grid(count: int) -> list[tuple[ScheduleName, int, int, int, tuple[float, float, float]]]:
    """Returns points of all schedules: ranks to 64, micro batches to 512, chunks to 8, few of which are large."""
    draw = random.Random(22)
    points: list[tuple[ScheduleName, int, int, int, tuple[float, float, float]]] = [
        ("1f1b", 64, 512, 1, (1.0, 1.0, 1.0)),
        ("interleaved", 16, 256, 8, (1.0, 1.0, 1.0)),
        ("zero_bubble", 64, 256, 1, (1.0, 1.5, 1.0)),
    ]
    while len(points) < count:
        name = draw.choice(NAMES)
        ranks = draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 64))
        virtual = draw.randint(1, 8) if name in ("interleaved", "breadth_first") else 2 if name == "zbv" else 1
        micros = draw.choice((1, 2, 3, 5, 8, 12, 16, 32, 64, 100, 512))
        if name == "interleaved":
            micros = ranks * draw.randint(1, 6)
        if name == "zero_bubble":
            micros = max(micros, ranks)
        times = (1.0, 1.0, 1.0) if name == "zbv" else (draw.random() + 0.1, draw.random() + 0.1, draw.random() + 0.1)
        if ranks * virtual * micros <= 2500:
            points.append((name, ranks, micros, virtual, times))
    return points


def test_simulated_bubbles_and_kept_micro_batches_are_the_formulas_on_200_points() -> None:
    for name, ranks, micros, virtual, (forward, inputs, weights) in grid(200):
        schedule = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
        costs = equal_costs(schedule.chunks, forward=forward, input_grads=inputs, weight_grads=weights)
        found = simulate(schedule, costs)
        formula = bubble_ratio(
            name,
            ranks=ranks,
            micros=micros,
            virtual=virtual,
            forward=forward,
            input_grads=inputs,
            weight_grads=weights,
        )
        at = (name, ranks, micros, virtual)
        assert found.bubble_ratio == pytest.approx(formula, abs=1e-9), at
        live = live_micro_batches(name, ranks=ranks, micros=micros, virtual=virtual)
        assert max(found.live) / virtual == pytest.approx(live, abs=1e-9), at


@pytest.mark.parametrize(
    ("ranks", "micros", "shares", "lives"),
    [
        (2, 8, (11.1, 5.9, 3.0, 3.0, 4.0, 5.9), (2.5, 2.25, 8)),
        (4, 8, (27.3, 15.8, 8.6, 8.6, 11.1, 15.8), (5.5, 4.75, 8)),
        (4, 16, (15.8, 8.6, 4.5, 4.5, 5.9, 8.6), (5.5, 4.75, 16)),
        (8, 32, (17.9, 9.9, 5.2, 5.2, 6.8, 9.9), (11.5, 9.75, 32)),
        (16, 32, (31.9, 19.0, 10.5, 10.5, 13.5, 19.0), (23.5, 19.75, 32)),
    ],
)
def test_shares_of_waiting_are_those_of_the_table(
    ranks: int, micros: int, shares: tuple[float, ...], lives: tuple[float, ...]
) -> None:
    cases: list[tuple[str, int, float]] = [
        ("1f1b", 1, 1),
        ("interleaved", 2, 1),
        ("interleaved", 4, 1),
        ("breadth_first", 4, 1),
        ("zero_bubble", 1, 1),
        ("zero_bubble", 1, 2),  # all is computed again, which counts with the gradients of the inputs
    ]
    kept: list[float] = []
    for (name, virtual, inputs), share in zip(cases, shares, strict=True):
        schedule = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
        found = simulate(schedule, equal_costs(schedule.chunks, input_grads=inputs))
        assert round(100 * found.bubble_share, 1) == share
        kept.append(max(found.live) / virtual)
    assert kept[1:4] == list(lives)
    gpipe = make_schedule("gpipe", ranks=ranks, micros=micros)
    assert round(100 * simulate(gpipe, equal_costs(ranks)).bubble_share, 1) == shares[0]


@pytest.mark.parametrize(("ranks", "micros"), [(2, 8), (4, 16), (8, 16), (16, 32)])
def test_the_efficiency_in_wide_use_is_that_of_interleaved_with_half_as_many_chunks_as_ranks(
    ranks: int, micros: int
) -> None:
    schedule = make_schedule("interleaved", ranks=ranks, micros=micros, virtual=ranks // 2)
    found = simulate(schedule, equal_costs(schedule.chunks))
    assert 1 - found.bubble_share == pytest.approx(half_interleaved_efficiency(ranks, micros), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_messages_and_zero_change_no_times(name: str) -> None:
    schedule = make_schedule(name, ranks=4, micros=8)
    costs = equal_costs(schedule.chunks, forward=2, input_grads=3, weight_grads=1, link=0.25)
    full = simulate(with_communication(with_zero(schedule, parameters="held")), costs)
    assert full.seconds == simulate(schedule, costs).seconds
    assert full.busy == simulate(schedule, costs).busy


def test_a_link_holds_up_what_waits_for_it_and_nothing_else() -> None:
    schedule = make_schedule("gpipe", ranks=2, micros=2)
    found = simulate(schedule, equal_costs(2, link=0.5))
    assert found.starts == ((0, 1, 6, 8), (1.5, 2.5, 3.5, 5.5))
    assert found.ends == ((1, 2, 8, 10), (2.5, 3.5, 5.5, 7.5))
    assert found.busy == (6, 6)
    assert found.idle == (4, 4)
    alone = make_schedule("interleaved", ranks=1, micros=2, virtual=3)
    assert simulate(alone, equal_costs(3, link=9)).seconds == 18, "there is no link inside a rank"


def test_the_dearest_chunk_sets_the_pace() -> None:
    schedule = make_schedule("1f1b", ranks=2, micros=50)
    costs = equal_costs(2)
    dear = simulate(schedule, type(costs)(forward=(1, 2), input_grads=(1, 2), weight_grads=(1, 2)))
    assert dear.seconds == 50 * 6 + 1 + 2
    assert dear.busy == (150, 300)


def test_waiting_for_each_other_is_an_error_and_so_are_costs_of_other_chunks() -> None:
    row = (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0))
    stuck = Schedule("stuck", 1, (0, 1), (row, (Action(Kind.BACKWARD, 1, 0),)))
    simulate(stuck, equal_costs(2))
    with pytest.raises(LayoutError, match=r"ranks \[0\] wait for ever"):
        simulate(Schedule("stuck", 1, (0, 1), (row, ())), equal_costs(2))
    with pytest.raises(LayoutError, match="forward has 3 chunks; expected 2"):
        simulate(stuck, equal_costs(3))


def test_what_has_no_formula_is_refused() -> None:
    with pytest.raises(LayoutError, match="no closed form for times"):
        bubble_ratio("zbv", ranks=2, micros=4, input_grads=2.0)
    with pytest.raises(LayoutError, match="no closed form for 3 micro batches on 4 ranks"):
        bubble_ratio("zero_bubble", ranks=4, micros=3)


@pytest.mark.depends_on_speed("it bounds processor seconds, of which a shared core takes more")
def test_131072_computations_are_made_proved_and_priced_in_seconds() -> None:
    """The bar is 3 s without pricing."""
    made = make_schedule("interleaved", ranks=16, micros=512, virtual=8)
    schedule = with_communication(made)

    def prove() -> None:
        again = with_communication(make_schedule("interleaved", ranks=16, micros=512, virtual=8))
        assert problems_of(again, capacity=1) == []

    proved_s = core_seconds(prove, tries=2)
    priced_s = core_seconds(lambda: simulate(schedule, equal_costs(128)), tries=2)
    found = simulate(schedule, equal_costs(128))
    assert sum(map(len, made.actions)) == 131_072
    assert max(live_of(schedule)) == 16 * 7 + 2 * 15 + 1
    assert found.bubble_ratio == pytest.approx(15 / (8 * 512), abs=1e-9)
    assert proved_s <= 3
    assert priced_s <= 1.5
