"""Which layers multiply in fp8 and what that needs, without torchao; and with it, in emulation, that stages agree."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import nn

from dsrun.config.sections.precision import Fp8
from dsrun.errors import ConfigError, ModelError
from dsrun.runtime.precision.fp8 import check_needs, choose_layers, use_fp8
from support.inside_engine import store_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: pip install 'dsrun[torchao]'"
)


class Own(nn.Linear):
    pass


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "up": nn.Linear(32, 48),
            "down": nn.Linear(48, 32, bias=False),
            "odd_in": nn.Linear(24, 32),
            "odd_out": nn.Linear(32, 61),
            "own": Own(32, 32),
            "norm": nn.LayerNorm(32),
            "attention": nn.MultiheadAttention(32, 2),
        }
    )


def test_linear_layers_with_widths_of_16_are_taken_and_the_others_say_why_not() -> None:
    chosen = choose_layers(model(), ["down"])
    assert chosen.taken == ("up",)
    assert chosen.left == {
        "down": "is excluded",
        "odd_in": "has a width of 24",
        "odd_out": "has a width of 61",
        "own": "is a Own",
        "attention.out_proj": "is a NonDynamicallyQuantizableLinear",
    }
    assert choose_layers(model(), []).taken == ("up", "down")


def test_a_model_that_is_one_layer_stays() -> None:
    assert choose_layers(nn.Linear(16, 16), []).left == {"": "is the model itself"}


def test_a_pattern_that_excludes_nothing_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"`fp8\.exclude` has 'lm_head', which matches the name of no linear layer"):
        choose_layers(model(), ["lm_head"])


@pytest.mark.parametrize(
    ("kind", "capability", "has_torchao", "emulate", "message"),
    [
        ("cpu", None, True, False, "this rank computes on cpu; expected a CUDA GPU of compute capability 8.9"),
        ("cuda", (8, 0), True, False, "this GPU has compute capability 8.0; expected 8.9 or more"),
        ("cuda", (7, 5), False, False, "this GPU has compute capability 7.5"),
        ("cuda", (9, 0), False, False, "the package torchao is not installed"),
        ("cpu", None, False, True, "the package torchao is not installed"),
    ],
)
def test_what_is_missing_is_named_with_the_way_out(
    kind: str, capability: tuple[int, int] | None, has_torchao: bool, emulate: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=r"`fp8\.enabled` is true") as got:
        check_needs(kind, capability, has_torchao=has_torchao, emulate=emulate)
    assert message in str(got.value)
    assert ("pip install" if "torchao" in message else "`fp8.emulate`") in got.value.render()


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_ada_and_later_have_it(capability: tuple[int, int]) -> None:
    check_needs("cuda", capability, has_torchao=True, emulate=False)


def test_initialize_refuses_it_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="this rank computes on cpu"):
        make_engine({**config(1, micro=2, bf16=True), "fp8": {"enabled": True}})


@needs_torchao
def test_a_model_without_such_a_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="no linear layer that can multiply in fp8: `0` has a width of 7"):
        use_fp8(nn.Sequential(nn.Linear(7, 16)), Fp8(enabled=True, emulate=True), torch.device("cpu"))


@needs_torchao
def test_parameters_stay_the_same_objects() -> None:
    layers = model()
    before = dict(layers.named_parameters())
    chosen = use_fp8(layers, Fp8(enabled=True, emulate=True), torch.device("cpu"))
    assert chosen.taken == ("up", "down")
    assert all(param is before[name] for name, param in layers.named_parameters())
    assert type(layers["up"]).__name__ == "Float8Linear"
    assert type(layers["odd_out"]) is nn.Linear


def _train(recipe: str, path: list[str]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    sys.path[:] = path
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for stage, more in ((0, {}), (1, {}), (3, {}), (3, {"activation_checkpointing": {"policy": "every_block"}})):
        torch.manual_seed(7)
        own: dict[str, Any] = {"enabled": True, "emulate": True, "recipe": recipe, "exclude": ["head"]}
        settings = {**config(stage, micro=3, bf16=True), "fp8": own, **more}
        engine = make_engine(settings, model=TinyGPT(width=32, layers=2, odd=0, vocab=64))
        if stage == 3:
            store_of(engine).poison = True
        found.append((train(engine, range(4), samples=6), full_parameters(engine)))
    plain = make_engine(config(0, micro=3, bf16=True), model=TinyGPT(width=32, layers=2, odd=0, vocab=64))
    found.append((train(plain, range(4), samples=6), full_parameters(plain)))
    return found


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_stages_agree_bit_for_bit_in_emulation(recipe: str) -> None:
    for *results, plain in run_ranks(2, _train, recipe, list(sys.path)):
        losses, weights = results[0]
        assert losses[-1] < losses[0], "it learns"
        assert losses != plain[0], "fp8 makes a difference"
        for found, of_case in results[1:]:
            assert found == losses
            assert all(torch.equal(of_case[name], value) for name, value in weights.items())
