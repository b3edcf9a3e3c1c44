"""Every file in configs/ loads on the ranks that it is for."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from dsrun.config.axes import sizes_of
from dsrun.config.findings import Severity
from dsrun.config.load import load

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted([*CONFIGS.glob("*.json"), *CONFIGS.glob("*.yaml")])


def name_of(path: Path) -> str:
    return path.name


def test_there_is_a_recipe_for_every_stage_and_a_library_beside() -> None:
    assert {f"zero{stage}" for stage in range(4)} <= {path.stem for path in RECIPES}
    assert len(RECIPES) >= 15


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_loads_on_any_number_of_ranks_that_its_axes_divide(path: Path, replicas: int) -> None:
    config = load(path, world_size=replicas * prod(sizes_of(load(path)).values()))
    assert config.batch is not None
    assert config.batch.train_batch_size == config.batch.micro_batch * config.batch.accumulation_steps * replicas
    assert [finding.render() for finding in config.findings if finding.severity is not Severity.NOTE] == []


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_says_what_it_is_for_and_where_its_schema_is(path: Path) -> None:
    from dsrun.config.text.source import read_source

    raw = read_source(path)[0].plain()
    assert raw["_comment"].endswith(".")
    if path.suffix == ".json":
        assert (path.parent / raw["$schema"]).resolve() == CONFIGS.parent / "docs" / "config.schema.json"
