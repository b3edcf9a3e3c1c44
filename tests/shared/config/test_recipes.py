"""Every file in configs/ loads, on any number of ranks, without an error or a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.config.findings import Severity
from dsrun.config.load import load

RECIPES = sorted((Path(__file__).parents[3] / "configs").glob("*.json"))


def test_the_demo_configs_are_there() -> None:
    assert {f"zero{stage}" for stage in range(4)} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_on_any_number_of_ranks(path: Path, world_size: int) -> None:
    config = load(path, world_size=world_size)
    assert config.batch is not None
    assert config.batch.train_batch_size == config.batch.micro_batch * config.batch.accumulation_steps * world_size
    assert [finding.render() for finding in config.findings if finding.severity is not Severity.NOTE] == []
    assert config.raw["_comment"]
