"""Whether gathering further ahead pays at stage 3: steps with 1, 2, 3 and 5 gather slots, in turns.

    dsrun -n 2 scripts/bench/gather_slots.py [--blocks 24] [--width 512] [--tokens 32] [--rounds 15]

All engines live side by side in the same ranks and take one step each a round, so that whatever else the machine does
falls on all of them. Each row: seconds of a step by the clock and of rank 0's processor, least and median, and what the
slots hold. On CPU ranks of one host a gather is over when its call returns, so what is ahead is order and memory alone;
see docs/decisions/0016-what-is-gathered-ahead-and-what-stays.md.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import dsrun
from dsrun.units import format_bytes

SLOTS = (1, 2, 3, 5)


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`, [tokens, width]."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_engine(blocks: int, width: int, *, slots: int) -> dsrun.Engine:
    """Makes an engine whose units are gathered `slots` - 1 ahead."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    block_numel = sum(param.numel() for param in model[0].parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            # A little more than the parameters, for gaps and padding.
            "stage3_prefetch_bucket_size": (slots - 1) * (block_numel + (block_numel >> 4)),
        },
    }
    return dsrun.initialize(model=model, config=config)[0]


def main() -> None:
    """Measures and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engines = {slots: make_engine(options.blocks, options.width, slots=slots) for slots in SLOTS}
    x = torch.randn(options.tokens, options.width, dtype=torch.bfloat16)
    clock: dict[int, list[float]] = {slots: [] for slots in SLOTS}
    processor: dict[int, list[float]] = {slots: [] for slots in SLOTS}
    for number in range(options.rounds + 2):
        for slots, engine in engines.items():
            began, used = time.perf_counter(), time.process_time()
            engine.backward(engine(x).float().square().mean())
            engine.step()
            if number >= 2:  # the first step records the order, the second one is the first to follow it
                clock[slots].append(time.perf_counter() - began)
                processor[slots].append(time.process_time() - used)
    first = next(iter(engines.values()))
    if first.global_rank == 0:
        print(f"{first.world_size} ranks, {options.blocks} blocks of width {options.width}, {options.tokens} tokens")
        for slots, engine in engines.items():
            held = next(use.reserved_bytes for use in engine.memory_arenas().arenas if "slot" in use.name)
            print(
                f"{slots} slots ({format_bytes(held)}): clock {min(clock[slots]) * 1e3:.1f} ms least, "
                f"{statistics.median(clock[slots]) * 1e3:.1f} median; processor {min(processor[slots]) * 1e3:.1f} "
                f"least, {statistics.median(processor[slots]) * 1e3:.1f} median"
            )


if __name__ == "__main__":
    main()
