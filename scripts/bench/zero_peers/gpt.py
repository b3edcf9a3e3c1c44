"""The model that all contenders train, in plain torch, and its data. Knows no contender."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .job import LARGE, Shape


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens to the loss of predicting each next one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, tokens + 1] to a loss in fp32."""
        x = self.tokens(ids[:, :-1]) + self.positions(torch.arange(ids.shape[1] - 1))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids[:, 1:].flatten())


def batch_of(shape: Shape, *, rank: int, step: int) -> Tensor:
    """Returns token numbers, [micro, seq + 1], the same for every contender."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(shape.vocab, (shape.micro, shape.seq + 1), generator=generator)


def large() -> GPT:
    """The model of the memory figures, without arguments, as `dsrun plan` asks for it."""
    return GPT(LARGE)
