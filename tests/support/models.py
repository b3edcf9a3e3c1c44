"""Small models that tests train: like real ones in shape, odd in size on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 61
CONTEXT = 12


class Block(nn.Module):
    """Attention and MLP with residuals; `odd` makes a size that no vector width divides."""

    def __init__(self, width: int, heads: int, *, odd: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + odd)
        self.down = nn.Linear(3 * width + odd, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x_BTD = x_BTD + self.out(a)
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class AdaptedBlock(Block):
    """A block whose own weights are frozen, with a low-rank path beside them, as in LoRA."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD) + self.high(self.low(x_BTD))


class TinyGPT(nn.Module):
    """A language model with embedding, blocks, final norm, head, a root parameter and a buffer."""

    def __init__(
        self, *, width: int = 72, layers: int = 3, tied: bool = False, vocab: int = VOCAB, odd: int = 1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4, odd=odd) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("scale", torch.tensor(1.0))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits_BTV.float().view(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))
