"""Tensors that were in the same steps share a history, whatever became of them since; a checkpoint has it all."""

from __future__ import annotations

import json

import torch

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.optim.states.histories import Histories, names_in, of_counts
from dsrun.runtime.optim.structure.runs import cut_points, cut_run, cut_runs
from dsrun.runtime.protocols import OwnedRange

NAMES = ("a", "b", "c", "d")


def histories_of(steps: list[str]) -> Histories:
    """Of steps that leave out the tensors that each names."""
    made = Histories()
    for step in steps:
        made.leave_out(tuple(step))
    return made


def same(histories: Histories) -> list[set[str]]:
    found: dict[int, set[str]] = {}
    for name in NAMES:
        found.setdefault(histories.of(name), set()).add(name)
    return sorted(found.values(), key=sorted)


def test_what_steps_leave_out_together_stays_together() -> None:
    histories = Histories()
    assert same(histories) == [set(NAMES)]
    assert histories.leave_out(("b", "c"))
    assert not histories.leave_out(("c", "b")), "the same ones again divide nothing"
    assert same(histories) == [{"a", "d"}, {"b", "c"}]
    assert histories.leave_out(("c", "d"))
    assert same(histories) == [{"a"}, {"b"}, {"c"}, {"d"}]
    assert histories.missed() == {"b": 2, "c": 3, "d": 1}


def test_equal_counts_of_other_steps_are_another_history() -> None:
    histories = histories_of(["a", "b"])
    assert histories.missed() == {"a": 1, "b": 1}
    assert histories.of("a") != histories.of("b")


def test_they_go_on_from_json() -> None:
    saved = histories_of(["ab", "b", "cd"]).to_json()
    other = Histories()
    other.leave_out(("a", "d"))
    other.load(json.loads(json.dumps(saved)))
    assert other.missed() == {"a": 1, "b": 2, "c": 1, "d": 1}
    assert same(other) == [{"a"}, {"b"}, {"c", "d"}]
    assert not other.leave_out(("c", "d"))
    assert names_in(saved) == set(NAMES)
    assert Histories().to_json() == []


def test_counts_of_steps_alone_tell_what_may_share_a_leaf() -> None:
    assert of_counts({"a": 7.0, "b": 5.0, "c": 7.0, "d": 5.0}) == [{"missed": 2, "names": ["b", "d"]}]
    assert of_counts(dict.fromkeys(NAMES, 3.0)) == []
    assert of_counts({}) == []


def test_a_run_is_cut_between_tensors_of_other_histories_alone() -> None:
    layout = lay_out("unit", [("a", (70,)), ("b", (5,)), ("none", (0,)), ("c", (64,)), ("d", (64,))], world_size=1)
    values, sums = torch.arange(float(layout.padded_numel)), torch.zeros(layout.padded_numel)
    owned = OwnedRange(layout, 0, values, sums, (0,) * 5)
    (run,) = cut_runs(owned)
    assert cut_points(run, histories_of([]).of) == []
    points = cut_points(run, histories_of(["bc"]).of)
    assert points == [128, 256]
    parts = cut_run(run, points)
    places = [(part.start, part.numel, part.first_name) for part in parts]
    assert places == [(0, 128, "a"), (128, 128, "b"), (256, 64, "d")]
    assert all(part.param.data_ptr() == values[part.start :].data_ptr() for part in parts)
    assert all(part.grad.data_ptr() == sums[part.start :].data_ptr() for part in parts)
    assert all(part.param.grad is part.grad for part in parts)
