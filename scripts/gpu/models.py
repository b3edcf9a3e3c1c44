"""The models that the GPU check trains, in plain torch: nothing here knows of dsrun.

Shapes: B batch, T time (tokens), D width, H heads, K width of a head, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .shapes import LlamaShape


class Block(nn.Module):
    """Attention with rotary positions and a gated MLP, each with a norm before it."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.projection = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x_BTD: Tensor, turn_TK: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, time, 3, self.heads, width // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(_turn(q_BHTK, turn_TK), _turn(k_BHTK, turn_TK), v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        x_norm = self.mlp_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(x_norm)) * self.up(x_norm))


class Llama(nn.Module):
    """Tokens in, the mean cross entropy of the next tokens out.

    Args:
        shape: its sizes.
        recomputes: forget what blocks compute, and compute it again in backward.
    """

    def __init__(self, shape: LlamaShape, *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.head_width = shape.width // shape.heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT[:, :-1])
        turn_TK = _angles(x_BTD.shape[1], self.head_width, x_BTD.device)
        for block in self.blocks:
            if self.recomputes:
                x_BTD = checkpoint(block, x_BTD, turn_TK, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, turn_TK)
        logits = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


def _angles(time: int, head_width: int, device: torch.device) -> Tensor:
    rates = 10_000 ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    return torch.outer(torch.arange(time, device=device), rates)


def _turn(x_BHTK: Tensor, angles_TK: Tensor) -> Tensor:
    cos, sin = angles_TK.cos().to(x_BHTK.dtype), angles_TK.sin().to(x_BHTK.dtype)
    even, odd = x_BHTK.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
