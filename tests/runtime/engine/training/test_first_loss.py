"""A first loss that is inf or nan leaves its step out at every stage; weights that nobody gathered are named."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.engine.training.first_loss import never_gathered_reads
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.unit import ParamUnit
from support.models import loss_of
from support.training import batches, config, full_parameters, make_engine

FORMATS = {"fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}, "bf16": {"bf16": True}}


def train_over(stage: int, dtype: str, factor: float) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights and skipped steps where the very first loss is multiplied by `factor`."""
    engine = make_engine(config(stage, micro=2, **cast("dict[str, Any]", FORMATS[dtype])))
    losses: list[float] = []
    for step in range(3):
        inputs, targets = batches(step, samples=2)
        loss = loss_of(engine(inputs), targets) * (factor if step == 0 else 1.0)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses[1:], full_parameters(engine), engine.skipped_steps


@pytest.mark.parametrize(("dtype", "factor"), [("fp16", float("inf")), ("fp16", float("nan")), ("bf16", float("inf"))])
def test_a_first_loss_without_a_number_is_a_step_left_out_at_every_stage(dtype: str, factor: float) -> None:
    losses, weights, skipped = train_over(0, dtype, factor)
    assert skipped == 1
    for stage in (1, 2, 3):
        found = train_over(stage, dtype, factor)
        assert (found[0], found[2]) == (losses, 1), stage
        for name, value in weights.items():
            assert torch.equal(found[1][name], value), (stage, name)


def test_a_first_loss_of_nan_that_would_go_into_the_weights_stays_an_error_at_stage_3() -> None:
    engine = make_engine(config(3, micro=2))
    inputs, targets = batches(0, samples=2)
    with pytest.raises(ModelError, match=r"the first loss is nan; its own numbers give that, or weights are used"):
        engine.backward(loss_of(engine(inputs), targets) * float("nan"))


class _HandedOutCopy(torch.autograd.Function):
    """As what `zero/hooks/outside.py` gives a read: a gathered copy."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        return param.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_a_graph_tells_which_weights_were_read_though_their_forward_never_ran() -> None:
    used, unused = (
        ParamUnit(UnitSpec(name, layer, ((f"{name}.weight", layer.weight),)), AloneCollectives(), index=at)
        for at, (name, layer) in enumerate((n, nn.Linear(4, 4, bias=False)) for n in ("a", "b"))
    )
    x, weight = torch.ones(2, 4), unused.params[0]
    assert never_gathered_reads((x @ used.params[0]).sum(), [unused]) == []
    assert never_gathered_reads((x @ used.params[0] @ weight).relu().sum() + weight.norm(), [unused]) == ["b.weight"]
    copied = cast("Tensor", _HandedOutCopy.apply(weight))
    assert never_gathered_reads((x @ copied).sum(), [unused]) == []
    assert never_gathered_reads((x @ copied).sum() + weight.sum(), [unused]) == ["b.weight"]
