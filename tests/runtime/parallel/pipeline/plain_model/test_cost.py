"""Blocks and ends are weighed by what they compute, from shapes alone."""

from __future__ import annotations

import torch
from torch import nn

from dsrun.runtime.parallel.pipeline.plain_model.cost import partition_of
from dsrun.runtime.parallel.pipeline.plain_model.uses import find_uses, slots_of
from dsrun.runtime.stacks import find_stacks


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)))


class Attention(Dense):
    num_heads = 2


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(16, 32, 8))
        self.top_k = 2


class Mixture(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()


class Listed(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.top_k = 1
        self.experts = nn.ModuleList(nn.Linear(8, 32, bias=False) for _ in range(4))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 100, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def costs(block: type[nn.Module], method: str = "cost") -> tuple[float, ...]:
    with torch.device("meta"):
        model = Model(block)
    stack = find_stacks(model, skip=lambda module: False)[0]
    slots = slots_of(model, stack)
    return partition_of(stack, slots, find_uses(model, stack, slots), 1, method, 1000).costs


def test_a_product_costs_two_operations_an_element_and_a_lookup_none() -> None:
    dense = 2.0 * (8 * 32 + 32 * 8)
    assert costs(Dense) == (dense, dense, dense + 2 * 8 * 100)


def test_attention_costs_by_the_length_of_the_sequence() -> None:
    assert costs(Attention)[0] - costs(Dense)[0] == 4.0 * 1000 * 8


def test_experts_cost_the_share_that_a_token_uses() -> None:
    assert costs(Mixture)[0] - costs(Dense)[0] == 2.0 * 16 * 32 * 8 * 2 / 16
    assert costs(Listed)[0] - costs(Dense)[0] == 2.0 * 4 * 8 * 32 / 4


def test_parameters_are_counted_with_both_ends() -> None:
    assert costs(Dense, "parameters") == (568 + 800, 568, 568 + 800)
