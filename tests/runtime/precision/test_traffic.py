"""Gradients of modules that are named travel in autocast's format, all others in fp32; stages agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.precision.traffic import low_precision_gradients
from dsrun.runtime.zero.units.find import REST, find_units
from support.inside_engine import store_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train

STEPS = 4


def model() -> TinyGPT:
    torch.manual_seed(7)
    return TinyGPT(width=72, layers=2)


def named(made: nn.Module, ids: frozenset[int]) -> set[str]:
    return {name for name, param in made.named_parameters() if id(param) in ids}


@pytest.mark.parametrize("name", ["Linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear"])
def test_a_class_is_named_with_or_without_its_package(name: str) -> None:
    made = model()
    linear = {
        f"{at}.{label}"
        for at, layer in made.named_modules()
        if type(layer) is nn.Linear
        for label, _ in layer.named_parameters()
    }
    assert named(made, low_precision_gradients(made, [name], compute=torch.float32)) == linear
    assert low_precision_gradients(made, [], compute=torch.float32) == frozenset()
    assert low_precision_gradients(made, ["Linear"], compute=torch.bfloat16) == frozenset()


@pytest.mark.parametrize("name", ["Conv2d", "torch.Linear.x", "mylib.Linear", "linear"])
def test_a_class_that_the_model_has_not_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match="no module of the model is of that class") as got:
        low_precision_gradients(model(), ["Linear", name], compute=torch.float32)
    assert "Block" not in got.value.render()
    assert "Embedding, LayerNorm, Linear, TinyGPT" in got.value.render()


def test_a_unit_that_travels_light_has_nothing_else_in_it() -> None:
    made = model()
    light = low_precision_gradients(made, ["Linear"], compute=torch.float32)
    units = find_units(made, light=light, comm_dtype=torch.bfloat16)
    wires = {unit.name: unit.comm_dtype for unit in units}
    bf16 = torch.bfloat16
    assert wires == {"embed": None, "blocks.0": bf16, "blocks.1": bf16, "head": bf16, REST: None}
    for unit in units:
        assert all((id(param) in light) is (unit.comm_dtype is not None) for _, param in unit.params)
    assert sum(len(unit.params) for unit in units) == len(list(made.parameters()))


def settings(stage: int, names: list[str], **more: Any) -> dict[str, Any]:
    autocast = {"enabled": True, "lower_precision_safe_modules": names}
    return config(stage, micro=2, torch_autocast=autocast, **more)


def _train(cases: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor], int]]:
    dsrun.init_distributed()
    found: list[tuple[list[float], dict[str, Tensor], int]] = []
    for case in cases:
        engine = make_engine(case, model=model())
        if case["zero_optimization"]["stage"] == 3:
            store_of(engine).poison = True
        losses = train(engine, range(STEPS), samples=4)
        reduced = engine.counters().collectives.bytes["reduce_scatter"]
        found.append((losses, full_parameters(engine), reduced))
    return found


def test_stages_agree_bit_for_bit_and_the_bytes_are_those_of_both_formats() -> None:
    cases = [settings(stage, ["Linear"]) for stage in (0, 1, 2, 3)]
    whole = settings(1, [])
    made = model()
    light = named(made, low_precision_gradients(made, ["Linear"], compute=torch.float32))
    for *results, plain in run_ranks(2, _train, [*cases, whole]):
        losses, weights, _ = results[0]
        assert losses[-1] < losses[0], "it learns"
        assert losses != plain[0], "sums over ranks are rounded"
        for found, of_case, _ in results:
            assert found == losses
            assert all(torch.equal(of_case[name], value) for name, value in weights.items())
        numel = sum(param.numel() for name, param in made.named_parameters() if name in light)
        saved = plain[2] - results[1][2]
        assert saved == pytest.approx(2 * numel * STEPS, rel=0.02), "but for padding"


def test_with_every_class_it_is_what_one_format_for_all_gives() -> None:
    everything = settings(1, ["Linear", "Embedding", "LayerNorm", "TinyGPT"])
    for one, other in run_ranks(2, _train, [everything, settings(1, [], communication_data_type="bf16")]):
        assert one[0] != other[0], "the rest unit travels in fp32"
