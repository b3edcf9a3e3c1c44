"""Trains a tiny GPT in the manner of Megatron-DeepSpeed's loop, saves half way, and goes on from that once more.

gpt_loop.py --deepspeed_config ds.json --out FOLDER
gpt_loop.py --plain --out FOLDER         torch alone, in one process
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch import Tensor, nn

MICRO, STEPS, ACCUMULATION = 2, 4, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        self.layers = nn.ModuleList(Block(32) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf"), device=x.device).triu(1)
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(layer, x, mask) if self.checkpoints else layer(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay; biases and norms do not."""
    named = list(model.named_parameters())
    return [
        {"params": [param for _, param in named if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for _, param in named if param.ndim <= 1], "weight_decay": 0.0},
    ]


class Annealing:
    """A schedule that is told by how much it goes on, as Megatron's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.samples = optimizer, 0
        self.step(0)

    def step(self, increment: int) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.samples / 16)

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]
        self.step(0)


def batch(number: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(0, 48, (MICRO * 2, 9), generator=draw)
    mine = tokens[rank::world]
    return mine[:, :-1], mine[:, 1:]


def plain(out: Path) -> None:
    torch.manual_seed(5)
    model = GPT(checkpoints=False)
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    schedule = Annealing(optimizer)
    losses, norms = [], []
    for number in range(STEPS * ACCUMULATION):
        loss = model(*batch(number, 0, 1))
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if (number + 1) % ACCUMULATION == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(MICRO * 2 * ACCUMULATION)
    (out / "facts.json").write_text(json.dumps({"losses": losses, "norms": norms}))


def engine_of(args: argparse.Namespace, seed: int) -> Any:
    torch.manual_seed(seed)
    model = GPT(checkpoints=True)
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, lr_scheduler=Annealing(optimizer), mpu=None
    )
    return engine


def train(engine: Any, first: int, last: int, timers: SynchronizedWallClockTimer) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    for number in range(first, last):
        timers("forward").start()
        loss = engine(*batch(number, rank, world))
        timers("forward").stop()
        engine.backward(loss)
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step(lr_kwargs={"increment": engine.train_batch_size()})
        if at_boundary:
            norms.append(float(engine.get_global_grad_norm()))
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses, norms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plain:
        plain(args.out)
        return
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    engine = engine_of(args, 5)
    timers = SynchronizedWallClockTimer()
    half, whole = STEPS * ACCUMULATION // 2, STEPS * ACCUMULATION
    losses, norms = train(engine, 0, half, timers)
    engine.save_checkpoint(str(args.out / "saved"), client_state={"iteration": half, "consumed": [half, "samples"]})
    rest = train(engine, half, whole, timers)
    second = engine_of(args, 6)
    _, state = second.load_checkpoint(str(args.out / "saved"))
    again = train(second, half, whole, timers)
    facts = {
        "losses": losses + rest[0],
        "norms": norms + rest[1],
        "again": again,
        "rest": rest,
        "state": {key: state[key] for key in ("iteration", "consumed")},
        "updates": [engine.global_steps, second.global_steps],
        "rates": [engine.get_lr(), second.get_lr()],
        "configured": deepspeed.checkpointing.is_configured(),
        "tracker": hasattr(tracker, "fork"),
        "timed": timers("forward").elapsed(reset=False) > 0,
    }
    if deepspeed.comm.get_rank() == 0:
        (args.out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
