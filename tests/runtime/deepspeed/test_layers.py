"""A tiled MLP gives the results and gradients of the whole one, called as DeepSpeed's is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.deepspeed.layers import GatherReplacedLayerParams, TiledMLP


class MLP(nn.Module):
    """Two matrices; `outside` is a parameter of another module that its function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("shape", [(2, 7, 6), (7, 6)])
@pytest.mark.parametrize("shards", [1, 3, 9])
def test_results_and_gradients_are_those_of_the_whole(shape: tuple[int, ...], shards: int) -> None:
    torch.manual_seed(5)
    whole = MLP().double()
    tiled = copy.deepcopy(whole)
    x = torch.randn(shape, dtype=torch.double)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outside = nn.Parameter(torch.ones(6, dtype=torch.double))
    made = TiledMLP.apply(lambda module, tile: MLP.forward(module, tile) * outside, tiled, ours, shards, [outside])
    expected = whole(theirs)
    torch.testing.assert_close(made, expected)
    assert tiled.calls == len(torch.chunk(x, shards, dim=-2))
    made.square().sum().backward()
    expected.square().sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)
    for mine, other in zip(tiled.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert outside.grad is not None
    assert outside.grad.abs().sum() > 0


def test_it_is_applied_in_the_forward_of_a_model_that_an_engine_has() -> None:
    def tiled_forward(self: MLP, x: Tensor) -> Tensor:
        return TiledMLP.apply(MLP.forward, self, x, 3, list(self.parameters()))

    class Tiled(MLP):
        forward = tiled_forward

    losses: list[list[float]] = []
    for kind in (MLP, Tiled):
        torch.manual_seed(3)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        }
        engine = dsrun.initialize(model=nn.Sequential(kind(), nn.Linear(6, 6)), config=settings)[0]
        x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1))
        found: list[float] = []
        for _ in range(3):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        engine.destroy()
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_no_shards_are_refused() -> None:
    with pytest.raises(ModelError, match="shards is 0"):
        TiledMLP.apply(MLP.forward, MLP(), torch.ones(3, 6), 0)


def test_layers_are_whole_without_tensor_parallelism() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    with GatherReplacedLayerParams(list(layer.parameters()), layer, enabled=True) as entered:
        assert entered is None
    assert torch.equal(layer.weight, before)
