"""Pictures of schedules: each computation is a box where and as long as it is computed; text fits a terminal."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from dsrun.pipeline_schedules.actions import COMPUTES
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.generate import NAMES, ScheduleName, make_schedule
from dsrun.pipeline_schedules.picture import MOST_BOXES, most_micros, svg_of, text_of
from dsrun.pipeline_schedules.simulate import equal_costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", NAMES)
def test_each_computation_is_a_box_of_its_time_with_its_letter_and_number(name: str) -> None:
    schedule = make_schedule(name, ranks=3, micros=6)
    timeline = simulate(with_communication(schedule), equal_costs(schedule.chunks, input_grads=1.5, link=0.25))
    root = ElementTree.fromstring(svg_of(timeline))
    groups = root.findall(f"{SVG}g")
    actions = [
        (action, end - start)
        for rank, row in enumerate(timeline.schedule.actions)
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True)
        if action.kind in COMPUTES
    ]
    assert len(groups) == len(actions)
    for group, (action, taken) in zip(groups, actions, strict=True):
        texts = [text.text for text in group.findall(f"{SVG}text")]
        assert texts[0] == f"{action.kind.value}{action.micro}"
        assert texts[1:] == ([f"c{action.chunk}"] if schedule.chunks > schedule.ranks else [])
        box = group.find(f"{SVG}rect")
        assert box is not None
        assert float(box.attrib["width"]) == pytest.approx(28 * taken, abs=0.02)


def test_pictures_stay_narrow_and_refer_to_nothing_outside() -> None:
    svg = svg_of(make_schedule("interleaved", ranks=8, micros=64, virtual=2))
    root = ElementTree.fromstring(svg)
    assert float(root.attrib["width"]) <= 1601
    assert svg.count("http") == 1, "the name space alone"
    assert "ranks wait" in svg


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_the_largest_picture_stays_below_two_megabytes(name: ScheduleName, ranks: int) -> None:
    virtual = 2 if name in ("interleaved", "breadth_first", "zbv") else 1
    micros = most_micros(name, ranks=ranks, virtual=virtual)
    made = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
    more = make_schedule(name, ranks=ranks, micros=micros + ranks, virtual=virtual)
    assert sum(map(len, made.actions)) <= MOST_BOXES < sum(map(len, more.actions))
    assert len(svg_of(made)) < 2_000_000


def test_a_pipeline_of_any_size_can_be_drawn_with_as_many_micro_batches_as_ranks() -> None:
    assert most_micros("interleaved", ranks=64, virtual=8) == 64


def test_text_shows_waiting_as_blanks() -> None:
    assert text_of(make_schedule("1f1b", ranks=2, micros=3)) == (
        "time    0  1  2  3  4  5  6  7  8  9  10 11\n"
        "rank 0  F0 F1       B0 -- F2 B1 --    B2 --\n"
        "rank 1     F0 B0 -- F1 B1 -- F2 B2 --\n"
        "\n"
        "1f1b: 2 ranks, 3 micro batches; ranks wait 25.0% of a step\n"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [60, 120])
def test_text_fits_its_columns_and_has_all_computations(name: str, columns: int) -> None:
    schedule = make_schedule(name, ranks=4, micros=8)
    text = text_of(schedule, columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    words = text.split()
    for row in schedule.actions:
        for action in row:
            label = str(action) if schedule.chunks > 4 else f"{action.kind.value}{action.micro}"
            assert label in words
