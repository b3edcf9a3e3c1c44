"""Train a Llama-shaped model in pipeline stages: the model is plain PyTorch, the config cuts it.

    dsrun -n 2 scripts/examples/pipeline.py --config configs/pipeline.json --steps 20
    dsrun -n 2 --backend gloo scripts/examples/pipeline.py --config configs/pipeline.json --steps 20    # two CPU ranks

Each rank has the layers of its stage alone. `engine.train_batch` runs the micro batches of one global batch through all
stages, and takes one update. The text is the Python standard library's own source, or any file or folder (`--data`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from gpt import TextWindows, read_text
from llama import Llama, next_byte_loss
from torch import Tensor

import dsrun
from dsrun.utils import RepeatingLoader


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
