"""An engine without an optimizer over a model that is frozen as a whole, as the reference model of preference training:
it answers as the plain model, and what trains is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config

STAGES = (0, 1, 2, 3)


def frozen_gpt() -> TinyGPT:
    torch.manual_seed(7)
    return TinyGPT().requires_grad_(False)


def evaluating(stage: int, **more: Any) -> dict[str, Any]:
    settings = config(stage, micro=2, **more)
    del settings["optimizer"]
    return settings


def evaluate(settings: dict[str, Any], folder: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], bool]:
    """Returns the logits, the weights gathered, exported on rank 0 and loaded again, and how much is on this rank."""
    engine = dsrun.initialize(model=frozen_gpt(), config=settings)[0]
    engine.eval()
    with torch.no_grad():
        engine(batches(1, samples=2)[0])  # other tokens, so slots are in use for the second time
        logits = engine(batches(0, samples=2)[0])
    with dsrun.zero.GatheredParameters(engine.module.parameters()):
        gathered = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.save_16bit_model(folder, "model.safetensors")
    exported = engine.module_state_dict(all_ranks=True)
    zeros = {name: torch.zeros_like(value) for name, value in exported.items()}
    engine.load_module_state_dict(zeros)
    with torch.no_grad():
        assert not engine(batches(0, samples=2)[0]).any(), "a model of zeros"
    engine.load_module_state_dict(exported)
    with torch.no_grad():
        assert torch.equal(engine(batches(0, samples=2)[0]), logits)
    blocks = list(engine.module.blocks.parameters())
    return logits, gathered, exported, any(dsrun.zero.is_zero_param(param) for param in blocks)


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_model_answers_and_is_exported_as_the_plain_one(stage: int, tmp_path: Path) -> None:
    plain = frozen_gpt()
    expected = plain(batches(0, samples=2)[0])
    for logits, gathered, exported, is_cut in run_ranks(2, evaluate, evaluating(stage), str(tmp_path)):
        assert torch.equal(logits, expected)
        assert is_cut == (stage == 3)
        for found in (gathered, exported):
            assert found.keys() == plain.state_dict().keys()
            assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("stage", STAGES)
def test_what_trains_is_refused_by_an_engine_that_evaluates(stage: int) -> None:
    engine = dsrun.initialize(model=frozen_gpt(), config=evaluating(stage, bf16=True))[0]
    inputs, targets = batches(0, samples=2)
    loss = loss_of(engine(inputs), targets)
    with pytest.raises(ModelError, match=r"engine\.backward: the engine has no optimizer"):
        engine.backward(loss)
    with pytest.raises(ModelError, match=r"engine\.step: the engine has no optimizer"):
        engine.step()
    engine.zero_grad()
    assert engine.bfloat16_enabled()
    assert not engine.fp16_enabled()


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_flow_through_a_frozen_model_to_its_input(stage: int) -> None:
    """As from a frozen scorer to what it scores."""
    torch.manual_seed(7)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)
    theirs = torch.ones(2, 64, requires_grad=True)
    plain(theirs).sum().backward()
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)
    engine = dsrun.initialize(model=model, config=evaluating(stage))[0]
    ours = torch.ones(2, 64, requires_grad=True)
    engine(ours).sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_has_nothing_to_gather_is_evaluated(stage: int) -> None:
    torch.manual_seed(7)
    tiny = nn.Linear(3, 2).requires_grad_(False)  # too small for a unit
    x = torch.ones(1, 3)
    expected = tiny(x)
    engine = dsrun.initialize(model=tiny, config=evaluating(stage))[0]
    assert torch.equal(engine(x), expected)
    with dsrun.zero.GatheredParameters(tiny.parameters(), modifier_rank=0):
        tiny.weight.zero_()
    assert torch.equal(engine(x)[0], tiny.bias)
    assert dsrun.initialize(model=nn.ReLU(), config=evaluating(stage))[0](-x).sum() == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_a_frozen_model_is_loaded_again(stage: int, tmp_path: Path) -> None:
    engine = dsrun.initialize(model=frozen_gpt(), config=evaluating(stage))[0]
    engine.save_checkpoint(tmp_path)
    torch.manual_seed(8)
    other = dsrun.initialize(model=TinyGPT().requires_grad_(False), config=evaluating(stage))[0]
    other.load_checkpoint(tmp_path)
    inputs, _ = batches(0, samples=2)
    assert torch.equal(other(inputs), engine(inputs))
