"""Seconds of operations, kernels and waits by step, each second once; and what an operation takes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.traces.figures import Operation, RankFigures, figures_of
from dsrun.launcher.traces.rank_trace import read_rank_trace
from support.rank_traces import BASE_S, a_span, a_step_label, write_rank_trace

T = BASE_S + 1000.0


@pytest.fixture
def figures(tmp_path: Path) -> RankFigures:
    events = [
        a_step_label(3, T, 1.0),
        a_span("aten::linear", T + 0.1, 0.4),
        a_span("aten::mm", T + 0.1, 0.3),
        a_span("wait all_gather of unit 0", T + 0.45, 0.02, cat="user_annotation"),
        a_span("wait all_gather of unit 1", T + 0.6, 0.1, cat="user_annotation"),
        a_span("gemm", T + 0.2, 0.2, cat="kernel", tid=7),
        a_span("gemm", T + 0.3, 0.2, cat="kernel", tid=8),
        a_step_label(4, T + 1.0, 0.5),
        a_span("aten::mm", T + 1.1, 0.25),
        a_step_label(5, T + 1.5, 0.1),
    ]
    write_rank_trace(tmp_path, 2, events, steps=[3, 4])
    return figures_of(read_rank_trace(tmp_path, 2))


def test_each_second_of_a_step_counts_once(figures: RankFigures) -> None:
    assert figures.rank == 2
    third, fourth = figures.steps
    assert (third.step, third.seconds) == (3, 1.0)
    assert third.cpu_ops_s == pytest.approx(0.38)
    assert third.waits_s == pytest.approx(0.12)
    assert third.kernels_s == pytest.approx(0.3)
    assert (fourth.step, fourth.seconds, fourth.waits_s) == (4, 0.5, 0.0)
    assert fourth.cpu_ops_s == pytest.approx(0.25)


def test_an_operation_has_neither_what_it_called_nor_what_it_waited(figures: RankFigures) -> None:
    rounded = [Operation(each.name, each.place, each.calls, round(each.seconds, 6)) for each in figures.operations]
    assert rounded == [
        Operation("aten::mm", "cpu", 2, 0.55),
        Operation("gemm", "gpu", 2, 0.4),
        Operation("aten::linear", "cpu", 1, 0.08),
    ]
