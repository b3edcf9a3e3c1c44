"""The table of optimizers: what its rows say of one another, and who reads them."""

from __future__ import annotations

import pytest

from dsrun.config.sections.optimizer import OPTIMIZERS
from dsrun.config.sections.optimizer_table import OPTIMIZER_ROWS, OptimizerRow, imported_class, row_of


def test_no_two_rows_share_a_name() -> None:
    names = [name.lower() for row in OPTIMIZER_ROWS for name in row.names]
    assert len(names) == len(set(names))


def test_the_config_builds_what_has_parameters_and_knows_the_rest() -> None:
    built = {name for row in OPTIMIZER_ROWS if row.params is not None for name in row.names}
    assert built == set(OPTIMIZERS.models)
    assert {name for row in OPTIMIZER_ROWS for name in row.names} - built <= set(OPTIMIZERS.planned)


@pytest.mark.parametrize("row", OPTIMIZER_ROWS, ids=lambda row: row.name)
def test_what_a_row_names_is_there(row: OptimizerRow) -> None:
    if row.plain is not None:
        assert row_of(row.plain).is_elementwise
    if row.imported_as is not None:
        assert row.imported_as in row.names
    if row.params is not None:
        assert set(row.further_states) <= set(row.params.model_fields)


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        ("AdamW", {}, 2),
        ("adam", {"amsgrad": True}, 3),
        ("SGD", {"momentum": 0.0}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 3),
        ("FusedLion", {"momentum": 0.9}, 1),
        ("Adam8bit", {}, 0.5078125),
    ],
)
def test_states_an_element_follow_the_options(kind: str, options: dict[str, float], states: float) -> None:
    assert row_of(kind).states_with(options) == states


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("adam", "AdamW"), ("AdamW", "AdamW"), ("SGD", "SGD"), ("lion", "Lion"), ("Adafactor", None), ("onebit", None)],
)
def test_a_run_of_deepspeeds_is_imported_as_the_class_that_takes_its_states(kind: str, expected: str | None) -> None:
    assert imported_class(kind) == expected
