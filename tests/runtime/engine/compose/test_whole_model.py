"""A run in pipeline stages leaves the record of its model that a run in one stage leaves: plans are made by it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsrun
from dsrun.contract.environment import RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.estimate.model.units import ModelSize
from dsrun.pipe import LayerSpec, PipelineModule
from dsrun.runtime.parallel.pipeline.ranks import JobRank
from support.pipelines import LAYERS, WIDTH, Case, Layer, Model, Tokens, layers_of, loss_fn, run
from support.ranks import run_ranks

PLAIN = Case(plain=True)


class Config:
    """A model's config, as transformers has it."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 37,
        }


class Listed(PipelineModule):
    """A list of layers of a class of the script's."""

    config = Config()


def recorded(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, **words: Any) -> ModelSize:
    """Returns the model that the first record of a case's run has."""
    folder.mkdir()
    monkeypatch.setenv(RUN_DIR_ENV, str(folder))
    run(case, lambda engine, data_rank: None, **words)
    return model_of(folder)


def model_of(folder: Path) -> ModelSize:
    first = json.loads(JobPaths(folder).records.read_text().splitlines()[0])
    assert first["event"] == "start"
    return ModelSize.from_json(first["model"])


def partly_frozen() -> nn.Module:
    model = Model(tied=False, dropout=0.0)
    for module in (model.positions, model.blocks[1], model.blocks[LAYERS - 1]):
        module.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "case",
    [
        Case(stages=2),
        Case(stages=1),
        Case(stages=2, tied=True, zero=1, data=2),
        Case(stages=2, schedule="breadth_first", virtual=2, zero=3, data=2),
        Case(stages=2, more={"zero_optimization": {"leaf_module": {"names": ["norm"]}}}),
        Case(stages=2, dtype="bf16", more={"data_types": {"keep_in_fp32_modules": ["norm", "blocks.*.norm"]}}),
    ],
    ids=str,
)
def test_a_plain_model_is_recorded_as_without_a_pipeline(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recorded(
        replace(case, stages=1, data=1, virtual=1, schedule="1f1b", plain=True), tmp_path / "1", monkeypatch
    )
    assert whole.trained_numel == sum(one.numel() for one in Model(tied=case.tied, dropout=0.0).parameters())
    assert recorded(case, tmp_path / "2", monkeypatch) == whole


def test_frozen_parameters_of_other_stages_are_recorded_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        recorded(case, tmp_path / str(case), monkeypatch, make=partly_frozen) for case in (PLAIN, Case(stages=2))
    )
    assert one.frozen_numel > 0
    assert two == one


def test_a_model_on_the_meta_device_is_recorded_as_one_with_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_meta(rank: int) -> nn.Module:
        with torch.device("meta"):
            return Model(tied=True, dropout=0.0)

    with_values = recorded(replace(PLAIN, tied=True), tmp_path / "1", monkeypatch)
    assert recorded(Case(stages=2), tmp_path / "2", monkeypatch, of_rank=on_meta) == with_values


def _without_some(case: Case, folder: Path) -> None:
    os.environ[RUN_DIR_ENV] = str(folder)
    model = Model(tied=False, dropout=0.0)
    some = [param for name, param in model.named_parameters() if ".norm." not in name]
    dsrun.initialize(model=model, model_parameters=some, config=case.config())[0].destroy()


def test_what_no_optimizer_group_has_is_recorded_as_frozen(tmp_path: Path) -> None:
    for ranks, case in ((1, PLAIN), (2, Case(stages=2))):
        (tmp_path / str(ranks)).mkdir()
        run_ranks(ranks, _without_some, case, tmp_path / str(ranks))
    whole = model_of(tmp_path / "1")
    assert whole.frozen_numel == LAYERS * 2 * WIDTH
    assert model_of(tmp_path / "2") == whole


def _built_in_slices(case: Case, folder: Path) -> None:
    os.environ[RUN_DIR_ENV] = str(folder)
    with dsrun.zero.Init(config_dict_or_path=case.config()):
        model = Model(tied=False, dropout=0.0)
    dsrun.initialize(model=model, config=case.config())[0].destroy()


def test_a_model_that_is_built_in_slices_is_recorded_as_one_that_is_built_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recorded(PLAIN, tmp_path / "1", monkeypatch)
    run_ranks(2, _built_in_slices, Case(stages=2, schedule="breadth_first", virtual=2, zero=3), tmp_path)
    assert model_of(tmp_path) == whole


@pytest.mark.parametrize("case", [Case(stages=2), Case(stages=2, virtual=2, schedule="interleaved"), Case(stages=4)])
def test_a_list_of_layers_is_recorded_as_in_one_stage(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Case(stages=1)
    whole = recorded(one, tmp_path / "1", monkeypatch, of_rank=layers_of(one))
    assert whole.architecture is not None
    assert recorded(case, tmp_path / "2", monkeypatch, of_rank=layers_of(case)) == whole


def test_modules_with_shared_and_frozen_parameters_in_a_list_are_recorded_as_in_one_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_rank(case: Case) -> Any:
        def make(rank: int) -> nn.Module:
            blocks = [Layer(0.0) for _ in range(LAYERS)]
            blocks[LAYERS - 1].up.weight = blocks[LAYERS - 2].up.weight
            blocks[LAYERS - 3].requires_grad_(False)
            layers = [LayerSpec(Tokens), *blocks, nn.Linear(32, 37)]
            module = Listed(layers, num_stages=case.stages, loss_fn=loss_fn, job=JobRank(rank, case.ranks))
            if len(module.forward_funcs) > 0 and isinstance(module.forward_funcs[-1], nn.Linear):
                module.forward_funcs[-1].bias.requires_grad_(False)  # once the list is made
            return module

        return make

    one, two = Case(stages=1), Case(stages=2)
    whole, cut = (recorded(case, tmp_path / str(case), monkeypatch, of_rank=of_rank(case)) for case in (one, two))
    assert cut == whole
    assert (whole.label, whole.frozen_numel > 37) == ("Listed", True)
    assert (whole.architecture is not None, whole.notes) == (True, ()), "of the model's config, not guessed"
