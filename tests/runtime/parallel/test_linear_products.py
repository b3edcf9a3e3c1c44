"""Layers that are cut over ranks have their backwards split as whole ones: weights wait, sums over ranks do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.linear_products import product_of
from dsrun.runtime.parallel.pipeline.weight_grads import DeferredWeightGrads
from dsrun.runtime.parallel.tensor.styles import ModelPlan
from support.cut_models import cut_over, plan_of


class Block(nn.Module):
    """Two columns of one input, and a row behind them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=bias), nn.Linear(16, 24, bias=bias)
        self.down_proj = nn.Linear(24, 16, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down_proj(self.gate_proj(y).tanh() * self.up_proj(y))


def model_of(*, bias: bool) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Block(bias=bias), Block(bias=bias))


def plan(model: nn.Module) -> ModelPlan:
    return plan_of(model)


def backward(model: nn.Module, x: Tensor, *, recomputes: bool, autocast: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for block in model.children():
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    return x.float().square().sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_two_halves_give_the_bits_of_one_backward(bias: bool, autocast: bool, recomputes: bool) -> None:
    model = model_of(bias=bias)
    models = [copy.deepcopy(model) for _ in range(2)]
    inputs = [torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]

    def body(axis: LoopbackCollectives) -> Any:
        mine = models[axis.rank]
        cut_over(mine, plan(mine), axis)
        twin = copy.deepcopy(mine)
        plain_inputs, split_inputs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
        for x in plain_inputs:
            backward(twin, x, recomputes=recomputes, autocast=autocast).backward()
        deferred = DeferredWeightGrads(mine)
        assert deferred.left == {}
        for micro, x in enumerate(split_inputs):
            loss = backward(mine, x, recomputes=recomputes, autocast=autocast)
            with deferred.deferring(0, micro):
                loss.backward()
        first_half = set(gradients(mine))
        sums = axis.traffic.calls.total()
        for micro in range(2):
            deferred.run(0, micro)
        assert axis.traffic.calls.total() == sums, "the second half talks to nobody"
        at_once = ["norm.weight", "norm.bias", *(["down_proj.bias"] if bias else [])]  # a row's is added behind its sum
        assert first_half == {f"{number}.{name}" for number in range(2) for name in at_once}
        same = [torch.equal(a.grad, b.grad) for a, b in zip(split_inputs, plain_inputs, strict=True)]  # type: ignore[arg-type]
        found, expected = gradients(mine), gradients(twin)
        assert found.keys() == expected.keys() == dict(mine.named_parameters()).keys()
        return all([*same, *(torch.equal(found[name], expected[name]) for name in expected)])

    assert LoopbackWorld(2).run(body) == [True, True]


def test_a_cut_layer_and_its_copies_have_their_own_product_again() -> None:
    models = [model_of(bias=True) for _ in range(2)]
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))

    def body(axis: LoopbackCollectives) -> None:
        mine = models[axis.rank]
        cut_over(mine, plan(mine), axis)
        expected = mine(x)
        deferred = DeferredWeightGrads(mine)
        with torch.no_grad():
            assert torch.equal(mine(x), expected), "a row's bias is added once, without gradients too"
        row = mine.get_submodule("0.down_proj")
        assert product_of(row) is not None
        copied = copy.deepcopy(mine)
        with torch.no_grad():
            for param in mine.parameters():
                param.zero_()
        assert torch.equal(copied(x), expected), "a copy has its own weights"
        deferred.remove()
        assert product_of(row) is None
        assert torch.equal(mine(x), x)

    LoopbackWorld(2).run(body)


def test_whole_matrices_of_the_exact_mode_are_multiplied_as_before() -> None:
    models = [model_of(bias=True) for _ in range(2)]
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))

    def body(axis: LoopbackCollectives) -> None:
        mine = models[axis.rank]
        cut_over(mine, plan(mine), axis, exact=True)
        twin = copy.deepcopy(mine)
        twin(x).sum().backward()
        deferred = DeferredWeightGrads(mine)
        loss = mine(x).sum()
        with deferred.deferring(0, 0):
            loss.backward()
        deferred.run(0, 0)
        found, expected = gradients(mine), gradients(twin)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    LoopbackWorld(2).run(body)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def test_a_layer_that_does_something_of_its_own_keeps_doing_it() -> None:
    models = [model_of(bias=False) for _ in range(2)]
    for model in models:
        model.get_submodule("0.down_proj").__class__ = Scaled
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))

    def body(axis: LoopbackCollectives) -> None:
        mine = models[axis.rank]
        cut_over(mine, plan(mine), axis)
        expected = mine(x)
        deferred = DeferredWeightGrads(mine)
        assert product_of(mine.get_submodule("0.down_proj")) is None
        assert torch.equal(mine(x), expected)
        deferred.remove()

    LoopbackWorld(2).run(body)
