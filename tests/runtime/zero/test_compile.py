"""torch.compile of blocks and of whole models: the gradients of eager mode, in as few graphs as there can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from support.inside_engine import store_of
from support.training import accumulated_gradients, make_engine

WIDTH = 65
LAYERS = 3
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(self.norm(x)).tanh()


class Stack(nn.Module):
    """Blocks between projections; the last one is read and not called."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.out.weight, self.out.bias)


def in_place(model: Stack) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def replaced(model: Stack) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]


def whole(model: Stack) -> None:
    model.compile(backend="aot_eager")


def make() -> Stack:
    torch.manual_seed(3)
    return Stack()


def sample(seed: int) -> Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("compiled", "graphs"), [(replaced, 1), (in_place, 1), (whole, None)])
def test_compiled_models_give_the_gradients_of_eager_ones(
    compiled: Callable[[Stack], None], graphs: int | None, stage: int
) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = make()
    compiled(model)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage},
    }
    engine = make_engine(settings, model=model)
    if stage == 3:
        store_of(engine).poison = True
    for step in range(3):
        plain = make()
        plain(sample(step)).square().mean().backward()
        engine.backward(engine(sample(step)).square().mean())
        found = accumulated_gradients(engine)
        for (name, param), ours in zip(plain.named_parameters(), engine.module.parameters(), strict=True):
            assert param.grad is not None
            key = next(key for key, value in engine.module.named_parameters() if value is ours)
            torch.testing.assert_close(found[key], param.grad, rtol=1e-5, atol=1e-7, msg=name)
        engine.step()
    if graphs is not None:  # all blocks share it
        assert counters["stats"]["unique_graphs"] == graphs
        assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= LAYERS + 4, counters["stats"]
