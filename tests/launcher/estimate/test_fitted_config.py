"""The config that `dsrun plan --fit` prints, and the line on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsrun.config.load import load
from support.cli import invoke

MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BATCH = "train_batch_size"
CONFIG: dict[str, Any] = {
    MICRO: 1,
    STEPS: 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "zero_optimization": {"stage": 1},
}
TWO_STAGES = {"pipeline": {"stages": 2}}
TRAINS_BY_BATCH = "; the script trains with `engine.train_batch`"


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def fitted(config: dict[str, Any], *words: str) -> tuple[dict[str, Any], str]:
    """Returns the config that is printed, which loads, and the line on it."""
    Path("ds.json").write_text(json.dumps(config))
    result = invoke("plan", "350M", "--seq", "512", "--config", "ds.json", "--fit", *words)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    load(document, world_size=2)
    return document, result.stderr


@pytest.mark.parametrize("written", ["auto", None])
def test_samples_that_a_config_leaves_open_are_not_written_beside_those_of_a_rank(written: str | None) -> None:
    document, _ = fitted({**CONFIG, BATCH: written}, "--gpus", "2xA100-80G")
    assert BATCH not in document
    assert document[MICRO] * document[STEPS] == 8


def test_samples_that_a_config_says_stay_in_it() -> None:
    document, _ = fitted({**CONFIG, BATCH: 16}, "--gpus", "2xA100-80G")
    assert document[BATCH] == 16
    assert document[MICRO] * document[STEPS] == 8


def test_a_script_that_is_given_stages_is_told_to_train_by_the_batch() -> None:
    document, said = fitted(CONFIG, "--gpus", "2x1xA100-80G", "--speed", "network=0.05")
    assert document["pipeline"]["stages"] == 2
    assert said.endswith(f"{TRAINS_BY_BATCH}\n")


def test_a_script_that_has_its_stages_is_told_nothing_of_training_by_the_batch() -> None:
    document, said = fitted({**CONFIG, **TWO_STAGES}, "--gpus", "2x1xA100-80G", "--speed", "network=0.05")
    assert document["pipeline"]["stages"] == 2
    assert "engine.train_batch" not in said


def test_a_script_that_loses_its_stages_is_told_nothing_of_training_by_the_batch() -> None:
    document, said = fitted({**CONFIG, **TWO_STAGES}, "--gpus", "2xA100-80G")
    assert "pipeline" not in document
    assert "`pipeline.stages` 1" in said
    assert "engine.train_batch" not in said
