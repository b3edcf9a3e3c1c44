"""Layouts that are possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.units import from_architecture, from_count
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.layouts import tensor_sizes
from support.planned_machines import gpus

#: 12 heads in 4 groups; the MLP divides by everything here.
SHAPE = Architecture(layers=4, hidden=768, intermediate=2304, heads=12, kv_heads=4, head_dim=64, vocab=1000)


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        (3, [1, 2, 3, 4]),  # four groups over three ranks: uneven, and asked for
        (8, [1, 2, 4]),  # 12 queries are no multiple of 8
        (6, [1, 2, 4]),  # of four groups six ranks can have no whole ones
        (4, [1, 2, 4]),
    ],
)
def test_the_size_that_is_asked_for_is_offered_where_heads_can_be_dealt_to_it(asked: int, offered: list[int]) -> None:
    settings = RunSettings(axis_sizes={"tensor": asked})
    assert tensor_sizes(from_architecture(SHAPE, label="m"), settings, gpus("A100-80G")) == offered


def test_a_rank_has_an_even_part_of_the_mlp_unless_asked_otherwise() -> None:
    model = from_architecture(replace(SHAPE, intermediate=2306), label="m")
    assert tensor_sizes(model, RunSettings(), gpus("A100-80G")) == [1, 2]
    assert tensor_sizes(model, RunSettings(axis_sizes={"tensor": 4}), gpus("A100-80G")) == [1, 2, 4]


def test_of_layers_whose_shape_is_not_known_no_other_size_is_offered() -> None:
    model = replace(from_count(10**9), architecture=None)
    assert tensor_sizes(model, RunSettings(axis_sizes={"tensor": 5}), gpus("A100-80G")) == [5]
