"""A model's description, and that plans made of it are what an engine then holds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dsrun.errors import ModelError
from dsrun.estimate.memory.model_state import pad_units, state_bytes
from dsrun.estimate.model.architecture import from_transformers
from dsrun.estimate.model.units import ModelSize, from_architecture
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.collectives import collective_bytes
from dsrun.runtime.engine.compose.describe import build_on_meta, describe, describe_units
from dsrun.runtime.engine.step_sums import NUMBERS
from dsrun.runtime.layout.cuts import CutParameter, RankPlacement
from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.zero.units.find import find_units
from dsrun.runtime.zero.units.unit import ParamUnit
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, make_engine, train


def on_meta(**options: Any) -> ModelSize:
    with torch.device("meta"):
        return describe(TinyGPT(**options))


def test_a_model_is_described_without_allocating_it() -> None:
    size = on_meta(width=72, layers=5)
    real = TinyGPT(width=72, layers=5)
    assert size.label == "TinyGPT"
    assert size.trained_numel == sum(param.numel() for param in real.parameters())
    assert [(unit.name, unit.count, unit.has_module) for unit in size.units] == [
        ("embed", 1, True),
        ("blocks.0", 5, True),
        ("head", 1, True),
        ("rest", 1, False),
    ]
    assert ModelSize.from_json(json.loads(json.dumps(size.to_json()))) == size


def test_the_shape_of_layers_is_guessed_from_embedding_and_blocks_and_said_to_be() -> None:
    size = on_meta(width=72, layers=5, vocab=61)
    assert size.architecture is not None
    shape = size.architecture
    assert (shape.layers, shape.hidden, shape.vocab, shape.tied) == (5, 72, 61, False)
    assert shape.intermediate == pytest.approx(3 * 72 + 1, rel=0.05)
    assert size.notes == ("layers as the embedding and the repeated blocks suggest; the MLP taken to have no gate",)


def test_a_model_without_repeated_blocks_has_no_shape_of_layers() -> None:
    assert describe(nn.Sequential(nn.Linear(64, 64), nn.ReLU())).architecture is None


def parametrised() -> nn.Module:
    """A model with a shape of layers, whose weights are computed."""
    wrap = parametrizations.spectral_norm
    blocks = nn.ModuleList(nn.Sequential(wrap(nn.Linear(32, 32)), nn.ReLU()) for _ in range(3))
    return nn.ModuleDict({"embed": nn.Embedding(8, 32), "blocks": blocks, "norm": wrap(nn.Linear(32, 32))})


def test_to_describe_a_model_computes_no_weight_of_it() -> None:
    model = parametrised()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert describe(model).architecture is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stage", [0, 3])
def test_to_make_an_engine_computes_no_weight_of_a_model(stage: int) -> None:
    torch.manual_seed(7)
    before = dict(parametrised().named_buffers())
    (after,) = run_ranks(1, buffers_after_initialize, stage)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def buffers_after_initialize(stage: int) -> dict[str, torch.Tensor]:
    """Returns a model's buffers behind `initialize`."""
    torch.manual_seed(7)
    engine = make_engine(config(stage, micro=1), model=parametrised())
    return {name: value.clone() for name, value in engine.module.named_buffers()}


def test_frozen_parameters_are_counted_apart() -> None:
    model = TinyGPT()
    model.embed.weight.requires_grad = False
    size = describe(model)
    assert size.frozen_numel == model.embed.weight.numel()
    assert size.numel == sum(param.numel() for param in model.parameters())


def test_what_stays_in_fp32_is_told_from_the_rest_also_beside_a_further_axis() -> None:
    model = TinyGPT()
    placement = RankPlacement(summed_over=("second",))
    cuts = {id(param): CutParameter(placement) for param in (model.norm.weight, model.norm.bias)}
    specs = find_units(model, kept=[id(model.norm.weight)], cuts=cuts)
    collectives = LoopbackWorld(1).run(lambda rank: rank)[0]
    units = [ParamUnit(spec, collectives, index=index) for index, spec in enumerate(specs)]
    rest = [(unit.name, unit.kept) for unit in describe_units(model, units).units if not unit.has_module]
    assert ("rest in fp32 summed over second", True) in rest
    assert {name for name, kept in rest if kept} == {spec.name for spec in specs if spec.dtype is not None}


@pytest.mark.parametrize("tied", [False, True])
def test_what_tensor_parallelism_leaves_whole_is_told_as_of_the_shape(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, **heads, tie_word_embeddings=tied)
    found = describe(transformers.LlamaForCausalLM(config))
    expected = from_architecture(from_transformers(config.to_dict(), source="test"), label="test")
    assert [(unit.uncut, unit.count) for unit in found.units] == [(unit.uncut, unit.count) for unit in expected.units]
    assert ModelSize.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:x", "ModuleNotFoundError"),
        ("json:no_such_name", "AttributeError"),
        ("json:loads", "TypeError"),
        ("builtins:dict", "returned dict; expected a torch.nn.Module"),
    ],
)
def test_what_cannot_be_built_is_told_with_its_reason(target: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_on_meta(target)


def test_as_a_program_it_prints_json_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mymodel.py").write_text(
        "from torch import nn\ndef make():\n    print('noise')\n    return nn.Linear(1000, 1000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "dsrun.runtime.engine.compose.describe", "mymodel:make"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ModelSize.from_json(json.loads(done.stdout)).numel == 1_001_000
    assert "noise" in done.stderr


def measured(stage: int, bf16: bool, options: dict[str, Any], micro: int) -> tuple[int, dict[str, int]]:
    """Trains two steps; returns bytes of model state, and bytes in collectives of the second step."""
    torch.manual_seed(0)
    engine = make_engine(config(stage, micro=micro, accumulation=2, bf16=bf16), model=TinyGPT(**options))
    samples = 2 * micro * engine.world_size
    train(engine, range(1), samples=samples)
    before = engine.counters()
    train(engine, range(1, 2), samples=samples)
    return engine.model_state_bytes(), dict(engine.counters().since(before).collectives.bytes)


#: Optimizers keep no states for the padding at the end of a unit: two of fp32 for less than 256 elements a rank.
_PADDING_BYTES = 2 * 4 * 256 * 2
#: Numbers of 8 bytes that no plan counts: those of `StepSums`, the norm, and what ranks compare by.
_SMALL_BYTES = (NUMBERS + 5) * 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_planned_state_and_traffic_are_what_two_ranks_hold_and_send(stage: int, bf16: bool) -> None:
    options = {"width": 128, "layers": 5}
    settings = RunSettings(stage=stage, compute_bytes=2 if bf16 else 4, accumulation_steps=2)
    units = pad_units(on_meta(**options).units, 2)
    planned = collective_bytes(units, settings)
    for state, traffic in run_ranks(2, measured, stage, bf16, options, 1):
        assert state == pytest.approx(state_bytes(units, settings).total, abs=_PADDING_BYTES * len(units))
        assert traffic.get("all_gather", 0) == planned.all_gather
        assert traffic.get("reduce_scatter", 0) == planned.reduce_scatter
        assert traffic["all_reduce"] == pytest.approx(planned.all_reduce, abs=_SMALL_BYTES)


#: 203 million parameters, most of them in blocks.
_LARGE: dict[str, Any] = {"width": 1240, "layers": 13, "vocab": 1000}


def measured_once(stage: int, options: dict[str, Any]) -> int:
    """Takes one step on one sample and returns the bytes of model state.

    Their values do not matter, and to draw 200 million of them takes longer than the step.
    """
    with torch.device("meta"):
        model = TinyGPT(**options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    engine = make_engine(config(stage, micro=1), model=model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    engine.backward(engine(tokens).float().square().mean())
    engine.step()
    return engine.model_state_bytes()


@pytest.mark.parametrize(
    "stage",
    [
        *(
            pytest.param(stage, marks=pytest.mark.soak("stage 3, and all stages of a small model"))
            for stage in (0, 1, 2)
        ),
        3,
    ],
)
def test_at_200m_parameters_planned_state_is_within_5_percent(stage: int) -> None:
    size = on_meta(**_LARGE)
    assert size.numel == pytest.approx(203e6, rel=0.02)
    planned = state_bytes(pad_units(size.units, 2), replace(RunSettings(), stage=stage)).total
    for state in run_ranks(2, measured_once, stage, _LARGE):
        assert abs(state - planned) / planned < 0.05
        assert abs(state - planned) / planned < 0.0001  # but for padding
