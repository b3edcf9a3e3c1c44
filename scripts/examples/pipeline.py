"""Train a Llama-shaped model in pipeline stages: the model is plain PyTorch, the config cuts it.

    dsrun -n 2 scripts/examples/pipeline.py --config configs/pipeline.json --steps 20
    dsrun -n 2 --backend gloo scripts/examples/pipeline.py --config configs/pipeline.json --steps 20    # two CPU ranks

Each rank has the layers of its stage alone. `engine.train_batch` runs the micro batches of one global batch through all
stages, and takes one update. The text is the Python standard library's own source, or any file or folder (`--data`).

Shapes: B batch, T time (bytes), D width, H heads, G key and value heads, K width of a head, V vocabulary (256 bytes).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import VOCABULARY, TextWindows, read_text
from torch import Tensor, nn

import dsrun
from dsrun.utils import RepeatingLoader


def rotate(x_BHTK: Tensor, angles_TK: Tensor) -> Tensor:
    """Turns each pair of numbers by an angle that grows with the position."""
    first, second = x_BHTK.chunk(2, dim=-1)
    cos, sin = angles_TK.cos().type_as(x_BHTK), angles_TK.sin().type_as(x_BHTK)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """Grouped attention and a gated MLP, each with a norm before it and a residual around it."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_width = heads, key_heads, width // heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x_BTD: Tensor, angles_TK: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        normed_BTD = self.attention_norm(x_BTD)
        q_BHTK = self.query(normed_BTD).view(batch, time, self.heads, self.head_width).transpose(1, 2)
        k_BGTK = self.key(normed_BTD).view(batch, time, self.key_heads, self.head_width).transpose(1, 2)
        v_BGTK = self.value(normed_BTD).view(batch, time, self.key_heads, self.head_width).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q_BHTK, angles_TK), rotate(k_BGTK, angles_TK), v_BGTK, is_causal=True, enable_gqa=True
        )
        x_BTD = x_BTD + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        normed_BTD = self.mlp_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))


class Llama(nn.Module):
    """Bytes in, logits of the next byte out. Nothing here knows of stages."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="text file or folder (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all, earlier runs included")
    parser.add_argument("--checkpoint", type=Path, help="folder to save in, and to go on from if it has a checkpoint")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(1234)
    with torch.device("meta"):  # no rank builds the layers of another
        model = Llama(width=args.width, heads=args.heads, key_heads=args.key_heads, layers=args.layers)
    data = TextWindows(read_text(args.data), args.context)
    engine, _, loader, _ = dsrun.initialize(model=model, training_data=data)
    if args.checkpoint:
        path, _ = engine.load_checkpoint(args.checkpoint, missing_ok=True)
        if path and engine.global_rank == 0:
            print(f"going on from {path} at step {engine.global_steps}")

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for window_BT in RepeatingLoader(loader):
            yield window_BT[:, :-1], window_BT[:, 1:]

    batches = pairs()
    while engine.global_steps < args.steps:
        engine.train_batch(batches, loss_fn=next_byte_loss)

    if args.checkpoint:
        engine.save_checkpoint(args.checkpoint)
    engine.destroy()


if __name__ == "__main__":
    main()
