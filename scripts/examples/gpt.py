"""Train a byte-level GPT on real text: a whole training script for dsrun, and a readable one.

    dsrun -n 2 scripts/examples/gpt.py --config configs/zero3.json --steps 200 --checkpoint checkpoints
    dsrun -n 1 scripts/examples/gpt.py --config configs/zero3.json --steps 300 --checkpoint checkpoints   # goes on

The text is the Python standard library's own source, which is on every machine, or any file or folder (`--data`).

Shapes: B batch, T time (bytes), D width, H heads, V vocabulary (256 bytes).
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import dsrun
from dsrun.errors import InputError

VOCABULARY = 256


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, time, 3, self.heads, width // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. A plain PyTorch model: nothing here knows of dsrun."""

    def __init__(self, *, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # Residual branches start small, so that depth does not change the scale at the start.
                branch = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if branch else 0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD = self.byte_embedding(bytes_BT) + self.position_embedding(positions)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class TextWindows(Dataset[Tensor]):
    """Windows of `context + 1` bytes, one after the other: inputs and their next bytes."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.windows = text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


def read_text(path: Path | None, *, limit: int = 16_000_000) -> Tensor:
    """Returns up to `limit` bytes, as uint8, of a file, of a folder's files, or of the standard library's source."""
    root = path or Path(sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else sorted(f for f in root.rglob("*.py" if path is None else "*") if f.is_file())
    if path is None:
        files = [f for f in files if not {"site-packages", "test", "tests", "idlelib"} & set(f.parts)]
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise InputError(
            f"--data {path}: no text to train on", hint="name a file or folder that exists and is not empty"
        )
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


@torch.no_grad()
def sample(engine: dsrun.Engine, prompt: str, *, length: int, context: int) -> str:
    """Continues `prompt`; every rank calls, for at ZeRO stage 3 a forward gathers parameters from all of them."""
    engine.eval()
    generator = torch.Generator().manual_seed(0)  # the same on every rank: all must run the same forwards
    text = torch.tensor([list(prompt.encode())], device=engine.device)
    for _ in range(length):
        logits_V = engine(text[:, -context:])[0, -1].float().cpu() / 0.8
        next_byte = torch.multinomial(logits_V.softmax(-1), 1, generator=generator)
        text = torch.cat([text, next_byte[None].to(text.device)], dim=1)
    engine.train()
    return bytes(text[0].tolist()).decode("utf-8", "replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="text file or folder (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all, earlier runs included")
    parser.add_argument("--batch", type=int, help="samples a step over all ranks (default: from the config)")
    parser.add_argument("--checkpoint", type=Path, help="folder to save in, and to go on from if it has a checkpoint")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--sample", type=int, default=0, help="bytes to write at the end")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(1234)
    model = GPT(width=args.width, heads=args.heads, layers=args.layers, context=args.context)
    data = TextWindows(read_text(args.data), args.context)
    engine, _, loader, _ = dsrun.initialize(model=model, training_data=data)
    assert loader is not None
    if args.batch:
        engine.set_train_batch_size(args.batch)
    if args.checkpoint:
        path, _ = engine.load_checkpoint(args.checkpoint, missing_ok=True)
        if path and engine.global_rank == 0:
            print(f"going on from {path} at step {engine.global_steps}")

    saved = engine.global_steps
    while engine.global_steps < args.steps:
        for window_BT in loader:
            window_BT = window_BT.to(engine.device)
            logits_BTV = engine(window_BT[:, :-1])
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), window_BT[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            if args.checkpoint and engine.global_steps > saved and engine.global_steps % args.save_every == 0:
                saved = engine.global_steps
                engine.save_checkpoint(args.checkpoint)
            if engine.global_steps >= args.steps:
                break

    if args.sample:
        text = sample(engine, "def ", length=args.sample, context=args.context)
        if engine.global_rank == 0:
            print(f"a sample of {args.sample} bytes:\n{text}")
    engine.destroy()


if __name__ == "__main__":
    main()
