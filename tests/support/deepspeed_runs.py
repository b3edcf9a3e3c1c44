"""The run whose checkpoints DeepSpeed saved into fixtures/deepspeed_checkpoints, see make.py there, on dsrun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsrun
from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import DsrunError

MADE = Path(__file__).parents[1] / "fixtures" / "deepspeed_checkpoints"
#: Losses of the steps after the checkpoints in fp32, as DeepSpeed 0.19.8 itself went on: alike at all of its stages.
LOSSES: list[float] = json.loads((MADE / "stage2" / "losses.json").read_text())


class Tiny(nn.Module):
    """The model: a tied weight, a frozen one, a buffer, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens_B: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.embed(tokens_B)))
        return self.head(self.frozen(hidden)).float().square().mean()


def engine_of(stage: int, *, universal: bool = False) -> Any:
    """Makes an engine on each rank, for global batches of four samples; its weights are others than the fixtures'."""
    torch.manual_seed(2)
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    config = {
        "train_micro_batch_size_per_gpu": 4 // int(os.environ["WORLD_SIZE"]),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }
    return dsrun.initialize(model=model, optimizer=optimizer, config=config)[0]


def update(engine: Any, step: int) -> float:
    """Takes a step of the run; returns this rank's loss."""
    samples_B = torch.cat([(torch.arange(2) * 3 + step + rank) % 9 for rank in range(2)])
    loss = engine(samples_B.chunk(engine.world_size)[engine.global_rank])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def go_on(folder: str, stage: int, universal: bool = False, tag: str | None = None) -> dict[str, Any]:
    """Loads a checkpoint as a script of DeepSpeed does, and takes the steps after it."""
    os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    engine = engine_of(stage, universal=universal)
    assert engine.load_universal_checkpoint() is universal
    path, state = engine.load_checkpoint(folder, tag=tag)
    rate = engine.get_lr()[0]
    losses = [update(engine, step) for step in range(3, 3 + len(LOSSES))]
    found = {"path": path, "state": state, "rate": rate, "losses": losses, "steps": engine.global_steps}
    engine.destroy()
    return found


def refusal(folder: str, as_deepspeed: bool) -> tuple[str, bool]:
    """Returns what a load says that fails, and whether the engine trains on as though nothing had happened."""
    if as_deepspeed:
        os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    engine = engine_of(2)
    text = "nothing"
    try:
        engine.load_checkpoint(folder)
    except DsrunError as error:
        text = error.render()
    update(engine, 0)
    steps = engine.global_steps
    engine.destroy()
    return text, steps == 1
