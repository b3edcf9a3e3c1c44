"""Stacks of blocks of several classes, and blocks around a part that others have too: units, and the same training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.zero.units.find import REST, find_units
from support.models import VOCAB, Block
from support.threaded_ranks import train_in
from support.training import config

CPU = torch.device("cpu")
WIDTH = 64


class Mixer(nn.Module):
    """A block of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).tanh()


class Around(nn.Module):
    """A layer around a block that other layers have too."""

    def __init__(self, shared: Block) -> None:
        super().__init__()
        self.shared, self.linear, self.own = shared, nn.Linear(WIDTH, WIDTH), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.linear(self.shared(x)))


def block() -> Block:
    return Block(WIDTH, 4, odd=0)


def two_classes() -> list[nn.Module]:
    return [Mixer(), block(), Mixer(), block()]


def same_part() -> list[nn.Module]:
    shared = block()
    return [Mixer(), Around(shared), Mixer(), Around(shared)]


def tied_parts() -> list[nn.Module]:
    """As in Zamba 2: blocks of their own with the parameters of one."""
    layers = [Mixer(), Around(block()), Mixer(), Around(block())]
    first, second = layers[1].shared, layers[3].shared
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    for name, param in list(first.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(second.get_submodule(owner), last, param)
    return layers


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("layers", [two_classes, same_part, tied_parts])
def test_stages_agree_and_little_stays_gathered(layers: Callable[[], list[nn.Module]]) -> None:
    def model() -> nn.Module:
        return Model(layers())

    whole = model()
    units = {unit.name: sum(param.numel() for _, param in unit.params) for unit in find_units(whole)}
    total = sum(param.numel() for param in whole.parameters())
    assert sum(units.values()) == total
    assert units.get(REST, 0) < total / 10, "embedding and head, which are small here"
    assert max(units.values()) < total / 2, "no unit is most of the model"
    for more in ({}, {"activation_checkpointing": {"policy": "every_block"}}, {"bf16": {"enabled": True}}):
        expected, found = (
            train_in(LoopbackWorld(2), {**config(stage, micro=2), **more}, device=CPU, model=model) for stage in (0, 3)
        )
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(torch.stack(one.losses), torch.stack(other.losses))
            assert one.norms == other.norms
