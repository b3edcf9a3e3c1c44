"""A model from a bare number, its units, and its way through JSON."""

from __future__ import annotations

import json

import pytest

from dsrun.errors import ModelError
from dsrun.estimate.model.units import ModelSize, from_count, parse_count

BILLION = 10**9


@pytest.mark.parametrize(
    ("text", "numel"),
    [("7B", 7 * BILLION), ("350M", 350_000_000), ("1.3b", 1_300_000_000), ("2T", 2 * 10**12), ("64k", 64_000)],
)
def test_a_count_is_read_in_decimal_units(text: str, numel: int) -> None:
    assert parse_count(text) == numel


@pytest.mark.parametrize("text", ["7", "B", "7GB", "-7B", "7 B", "7e9", "train.py", ""])
def test_other_text_is_no_count(text: str) -> None:
    assert parse_count(text) is None


@pytest.mark.parametrize("numel", [10_000, 10**6, 350 * 10**6, 7 * BILLION, 405 * BILLION, 2000 * BILLION])
def test_units_of_a_count_add_up_to_it(numel: int) -> None:
    model = from_count(numel)
    assert model.numel == numel
    assert sum(unit.numel * unit.count for unit in model.units) == pytest.approx(numel, rel=0.01)


def test_a_count_near_a_known_model_has_its_width_and_says_so() -> None:
    model = from_count(7 * BILLION)
    assert model.architecture is not None
    assert (model.architecture.layers, model.architecture.hidden) == (32, 4096)
    assert model.notes == ("the number says no more than the size: layers as in Llama 2 7B (32 of width 4096)",)


def test_a_count_far_from_all_known_models_is_scaled_in_width() -> None:
    model = from_count(2000 * BILLION)
    assert model.architecture is not None
    assert model.architecture.numel == pytest.approx(2000 * BILLION, rel=0.05)


def test_a_model_survives_json() -> None:
    model = from_count(7 * BILLION)
    assert ModelSize.from_json(json.loads(json.dumps(model.to_json()))) == model


@pytest.mark.parametrize("data", [{}, {"units": 3}, {**from_count(10**6).to_json(), "units": [{"name": "x"}]}])
def test_json_of_something_else_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="the description of a model cannot be read"):
        ModelSize.from_json(data)


def test_adapters_leave_the_rest_frozen() -> None:
    model = from_count(7 * BILLION).with_trained(40_000_000)
    assert (model.trained_numel, model.frozen_numel, model.numel) == (40_000_000, 6_960_000_000, 7 * BILLION)
    assert sum(unit.numel * unit.count for unit in model.units) == pytest.approx(40_000_000, rel=0.01)
    frozen = sum(unit.frozen * unit.count for unit in model.units)
    assert frozen == pytest.approx(6_960_000_000, rel=0.01), "in the units of their modules, which stage 3 cuts"
    assert model.units[-1].frozen == 0, "what has no module to itself stays whole"


def test_a_record_of_an_older_version_has_no_frozen_units() -> None:
    data = from_count(10**6).to_json()
    for unit in data["units"]:
        del unit["frozen"], unit["frozen_numel"]
    assert ModelSize.from_json(data) == from_count(10**6)


def test_more_trained_parameters_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match="`--trained 8B` is more than the model's 7B parameters"):
        from_count(7 * BILLION).with_trained(8 * BILLION)
