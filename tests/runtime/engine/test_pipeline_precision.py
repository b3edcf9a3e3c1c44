"""The norm of gradients in pipeline stages: the same bits on every rank, and within 2^-45 of one process in fp64.

The model's gradients are exact in each dtype: weights are permutations with signs, times powers of two, inputs are
small whole numbers, and means are of powers of two. So one process in fp64 has the same gradients, and what is left is
how the norm is summed. That takes the squares of 256 neighbouring elements in fp32 (decision 0005), and the sum of all
of these exactly. The powers of two spread squares over many bits: a total in fp32 would be far outside of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.optim.norm import block_norms
from dsrun.runtime.zero.units.find import find_units
from support.covering import covering
from support.pipelines import Case, run

WIDTH, VOCABULARY, BLOCKS, MICROS = 16, 32, 8, 4


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        signs = torch.randint(0, 2, (WIDTH,)) * 2.0 - 1
        self.linear.weight.data.copy_(torch.diag(scale * signs)[torch.randperm(WIDTH)])
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.linear(x_BTD)


class Exact(nn.Module):
    """Tokens in, logits out.

    Args:
        tied: whether the head has the embedding's weight.
    """

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(2.0 ** (6 if number % 3 else -12)) for number in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            weight.data.copy_(torch.randint(-1, 2, weight.shape))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def loss_fn(logits_BTV: Tensor, classes_BT: Tensor) -> Tensor:
    """Mean over B·T = 8 of the logits of the labels' classes; each of their gradients is 1/8, times a power of two."""
    return logits_BTV.gather(-1, classes_BT.unsqueeze(-1)).mean()


def batches(data_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(MICROS):
        generator = torch.Generator().manual_seed(1000 * data_rank + number)
        tokens, classes = torch.randint(0, VOCABULARY, (2, 2, 4), generator=generator)
        yield tokens, classes


def norms_in_one_process(*, tied: bool, data: int) -> tuple[float, float]:
    """Returns the norm in fp64 of the norms of blocks, and that of the elements themselves."""
    model = Exact(tied=tied).double()
    for rank in range(data):
        for tokens, classes in batches(rank):
            (loss_fn(model(tokens), classes) / (MICROS * data)).backward()
    blocks: list[float] = []
    for unit in find_units(model):
        layout = lay_out(unit.name, [(name, param.shape) for name, param in unit.params], world_size=1)
        grads_N = torch.zeros(layout.padded_numel)
        for extent, (_, param) in zip(layout.extents, unit.params, strict=True):
            assert param.grad is not None
            grads_N[extent.offset : extent.offset + extent.numel] = param.grad.view(-1)
        blocks += block_norms(grads_N).tolist()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    elements = [value for grad in grads for value in grad.view(-1).tolist()]
    return _root_of_squares(blocks), _root_of_squares(elements)


def _root_of_squares(values: list[float]) -> float:
    return math.sqrt(math.fsum(value**2 for value in values))


def norm_of(engine: Any, data_rank: int) -> float:
    engine.train_batch(batches(data_rank), loss_fn=loss_fn)
    norm = engine.get_global_grad_norm()
    assert isinstance(norm, float)
    return norm


CASES = [
    Case(stages=1, plain=True),
    Case(stages=1),
    Case(stages=2),
    Case(stages=4),
    Case(stages=2, schedule="gpipe"),
    Case(stages=2, schedule="interleaved", virtual=2),
    Case(stages=2, schedule="interleaved", virtual=4),
    Case(stages=2, schedule="zero_bubble"),
    Case(stages=2, schedule="zbv"),
    *(Case(stages=2, data=2, zero=zero) for zero in range(4)),
    *(Case(stages=2, schedule="breadth_first", virtual=2, data=2, zero=zero) for zero in range(4)),
]


@pytest.mark.parametrize(
    ("case", "tied", "dtype"),
    covering(
        {str(case): case for case in CASES},
        {"untied": False, "tied": True},
        {"fp32": "fp32", "bf16": "bf16"},
        together=1,
    ),
)
def test_the_norm_has_the_same_bits_on_all_ranks_and_is_that_of_one_process_in_fp64(
    case: Case, tied: bool, dtype: str
) -> None:
    norms = run(replace(case, dtype=dtype), norm_of, make=lambda: Exact(tied=tied))
    assert len(set(norms)) == 1, norms
    of_blocks, of_elements = norms_in_one_process(tied=tied, data=case.data)
    assert abs(norms[0] - of_blocks) <= 2.0**-45 * of_blocks, (norms[0], of_blocks)
    assert abs(norms[0] - of_elements) <= 2.0**-23 * of_elements, (norms[0], of_elements)


def test_a_total_in_fp32_would_be_outside_of_the_bound() -> None:
    of_blocks, _ = norms_in_one_process(tied=False, data=1)
    assert abs(torch.tensor(of_blocks).item() - of_blocks) > 1000 * 2.0**-45 * of_blocks
