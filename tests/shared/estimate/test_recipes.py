"""Every recipe in configs/ can be planned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsrun.config.load import inspect
from dsrun.estimate.model.units import from_count, parse_count
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import read_settings

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted([*CONFIGS.glob("*.json"), *CONFIGS.glob("*.yaml")])


def plan(
    path: Path,
    model: str = "1B",
    *,
    gpu: str = "H100-80G",
    ranks: int = 8,
    host_memory: int | None = None,
    seq: int = 2048,
) -> Prediction:
    config = inspect(path, keep_planned=True).config
    assert config is not None
    spec = find_gpu(gpu)
    numel = parse_count(model)
    assert numel is not None
    machine = Machine(
        label=gpu,
        ranks=ranks,
        ranks_per_host=min(8, ranks),
        gpu=spec,
        gpu_memory_bytes=spec.memory_bytes,
        host_memory_bytes=host_memory,
        given=Speeds(nvme_read=3e9, nvme_write=2e9),  # which no catalogue can know
    )
    return predict(from_count(numel), read_settings(config, ranks=ranks, sequence=seq), machine)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_planned_and_runs(path: Path) -> None:
    named = re.search(r"-(\d+b)-(\d+)x", path.name)
    prediction = plan(path) if named is None else plan(path, named[1], ranks=int(named[2]))
    assert prediction.settings.can_run
    assert prediction.step.complete
    assert prediction.tier("GPU").complete


@pytest.mark.parametrize(
    ("recipe", "model", "gpu", "ranks", "seq"),
    [
        ("finetune-7b-8x24gb.json", "7B", "RTX4090-24G", 8, 1024),
        ("finetune-7b-8x80gb.json", "7B", "A100-80G", 8, 1024),
        ("pretrain-1b-8x80gb.json", "1B", "A100-80G", 8, 1024),
        ("finetune-70b-8x80gb.json", "70B", "H100-80G", 8, 4096),
        ("finetune-7b-1x24gb-offload.json", "7B", "RTX4090-24G", 1, 1024),
        ("pretrain-405b-128x80gb.json", "405B", "H100-80G", 128, 4096),
    ],
)
def test_a_recipe_fits_the_machine_in_its_name(recipe: str, model: str, gpu: str, ranks: int, seq: int) -> None:
    assert plan(CONFIGS / recipe, model, gpu=gpu, ranks=ranks, host_memory=2 << 40, seq=seq).fits


@pytest.mark.parametrize(
    ("recipe", "model", "ranks"),
    [
        ("finetune-7b-8x24gb.json", "7B", 8),
        ("finetune-7b-8x80gb.json", "7B", 8),
        ("pretrain-1b-8x80gb.json", "1B", 8),
        ("pretrain-405b-128x80gb.json", "405B", 128),
    ],
)
def test_the_comment_of_a_recipe_says_what_its_states_take(recipe: str, model: str, ranks: int) -> None:
    said = re.search(r"(\d+) GB of states per rank", (CONFIGS / recipe).read_text())
    assert said is not None
    state = plan(CONFIGS / recipe, model, ranks=ranks).state
    resident = state.total - state.gather_slots - state.gradient_slots
    assert int(said[1]) == round(resident / 1e9)


def test_the_comment_of_the_recipe_for_16_hosts_is_what_the_plan_says() -> None:
    said = json.loads((CONFIGS / "pretrain-405b-128x80gb.json").read_text())["_comment"]
    found = plan(CONFIGS / "pretrain-405b-128x80gb.json", "405B", ranks=128, seq=4096)
    assert found.pipeline is not None
    assert f"{found.pipeline.bubble:.1%} of a step" in said.replace(" %", "%")
    away = round((found.state.masters + found.state.states) / 1e9)
    assert f"{away} GB of masters and Adam's moments" in said
