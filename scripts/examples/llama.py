"""A Llama-shaped model in plain PyTorch, for the examples: it knows nothing of ranks.

Heads are counted by `-1`, so that attention computes with as many as its weights give it: a rank that has a part of the
weights has a part of the heads.

Shapes: B batch, T time (bytes), D width, H heads, G key and value heads, K width of a head, V vocabulary (256 bytes).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt import VOCABULARY
from torch import Tensor, nn


def rotate(x_BHTK: Tensor, angles_TK: Tensor) -> Tensor:
    """Turns each pair of numbers by an angle that grows with the position."""
    first, second = x_BHTK.chunk(2, dim=-1)
    cos, sin = angles_TK.cos().type_as(x_BHTK), angles_TK.sin().type_as(x_BHTK)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped attention: several heads of queries go with one of keys and values."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.value = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, angles_TK: Tensor) -> Tensor:
        batch, time, _ = x_BTD.shape
        q_BHTK, k_BGTK, v_BGTK = (
            layer(x_BTD).view(batch, time, -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed_BHTK = F.scaled_dot_product_attention(
            rotate(q_BHTK, angles_TK), rotate(k_BGTK, angles_TK), v_BGTK, is_causal=True, enable_gqa=True
        )
        return self.out(mixed_BHTK.transpose(1, 2).reshape(batch, time, -1))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, key_heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = Mlp(width, 3 * width)

    def forward(self, x_BTD: Tensor, angles_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), angles_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, width: int, heads: int, key_heads: int, layers: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads, key_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        speeds_K = 10_000 ** -(torch.arange(0, self.head_width, 2, device=bytes_BT.device) / self.head_width)
        angles_TK = positions_T[:, None] * speeds_K
        x_BTD = self.embedding(bytes_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, angles_TK)
        return self.head(self.norm(x_BTD))


def next_byte_loss(logits_BTV: Tensor, next_BT: Tensor) -> Tensor:
    """Returns the mean loss over all bytes."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), next_BT.flatten())
