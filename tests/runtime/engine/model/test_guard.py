"""A model that has been changed behind its engine's back is refused at the step, by the name of what was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dsrun
from dsrun.errors import ModelError
from support.models import TinyGPT, loss_of
from support.training import batches, config, full_parameters, make_engine

STAGES = (0, 1, 2, 3)


def backward(engine: Any) -> None:
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets))


def _other_shape(model: TinyGPT) -> None:
    model.position.data = model.position.data.t().contiguous()


def _new_head(model: TinyGPT) -> None:
    model.head = nn.Linear(72, 61, bias=False)


def _adapter(model: TinyGPT) -> None:
    model.blocks[1].adapter = nn.Linear(72, 4)


def _late_parameter(model: TinyGPT) -> None:
    model.norm.gain = nn.Parameter(torch.ones(72))


def _frozen_later(model: TinyGPT) -> None:
    model.head.requires_grad_(False)


def _trained_later(model: TinyGPT) -> None:
    model.norm.requires_grad_(True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nn.Module.double, r"`[\w.]+` has other memory than the engine gave it \(now float64 of shape .* on cpu\)"),
        (_other_shape, r"`position` has other memory than the engine gave it \(now float32 of shape \(72, 12\) on"),
        (_new_head, r"`head\.weight` has come since the engine was made"),
        (_adapter, r"`blocks\.1\.adapter\.weight` has come since the engine was made"),
        (_late_parameter, r"`norm\.gain` has come since the engine was made"),
        (_frozen_later, r"`head\.weight` was trained when the engine was made and has been frozen since"),
        (_trained_later, r"`norm\.weight` was frozen when the engine was made and has been unfrozen since"),
    ],
)
def test_what_would_not_reach_the_weights_is_refused_at_the_step(
    stage: int, change: Callable[[Any], object], message: str
) -> None:
    model = TinyGPT()
    model.norm.requires_grad_(False)
    engine = make_engine(config(stage, micro=2), model=model)
    backward(engine)
    with pytest.raises(ModelError, match=message) as caught:  # noqa: PT012 - at stage 3 some are refused at once
        change(model)
        engine.step()
    assert caught.value.hint
    assert engine.global_steps == 0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
@pytest.mark.parametrize("after_forward", [False, True])
def test_a_conversion_is_refused_by_name_before_torch_stumbles_over_it(
    stage: int, convert: Callable[[Any], object], after_forward: bool
) -> None:
    engine = make_engine(config(stage, micro=2))
    inputs, targets = batches(0, samples=2)
    with pytest.raises(ModelError, match=r"`[\w.]+` has other memory than the engine gave it"):  # noqa: PT012 - likewise
        if not after_forward:
            convert(engine.module)
        loss = loss_of(engine(inputs), targets)
        convert(engine.module)
        engine.backward(loss)


class _Reals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise RuntimeError("the model's own")
        return self.layer(x).sum()


def test_a_forward_that_fails_for_a_conversion_names_it_and_other_errors_stay_what_they_are() -> None:
    engine = make_engine(config(1, micro=2), model=_Reals())
    with pytest.raises(RuntimeError, match="the model's own"):
        engine(torch.ones(2, 3), fail=True)
    engine.module.double()
    with pytest.raises(ModelError, match=r"`layer\.weight` has other memory than the engine gave it"):
        engine(torch.ones(2, 3))


class Wrapper(nn.Module):
    """Another module around one of the model's, as torch.compile makes one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("stage", STAGES)
def test_what_does_no_harm_is_let_through(stage: int) -> None:
    """Parameters in another wrapper, a move to where they are, flags set back, and values set where that is allowed."""
    expected = make_engine(config(stage, micro=2))
    model = TinyGPT()
    engine = make_engine(config(stage, micro=2), model=model, seed=7)
    engine.load_module_state_dict(expected.module_state_dict(all_ranks=True))
    for step in range(3):
        if step == 1:
            model.blocks[0] = Wrapper(model.blocks[0])
            model.to("cpu").float()
            model.requires_grad_(False).requires_grad_(True)
            model.eval().train()
            with dsrun.zero.GatheredParameters(model.head.weight, modifier_rank=0):
                model.head.weight.data = model.head.weight.data.clone()
            model.register_buffer("seen", torch.zeros(3))
        for other in (engine, expected):
            backward(other)
            other.step()
    theirs = full_parameters(expected)
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_with_rate_0_is_frozen_for_as_long(stage: int) -> None:
    """The way out that the refusal names."""
    model = TinyGPT()
    head = list(model.head.parameters())
    others = [param for name, param in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": head, "lr": 0.0}, {"params": others}]
    engine = dsrun.initialize(model=model, model_parameters=groups, config=config(stage, micro=2))[0]
    before = full_parameters(engine)
    for rate in (0.0, 0.1):
        engine.optimizer.param_groups[0]["lr"] = rate
        backward(engine)
        engine.step()
        after = full_parameters(engine)
        assert torch.equal(after["head.weight"], before["head.weight"]) == (rate == 0.0)
        assert not torch.equal(after["position"], before["position"])
