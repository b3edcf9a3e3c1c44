"""Trains a small network with Lightning Fabric, saves half way, and loads that into another network.

With `--strategy none` it trains in one process, without DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning_cpu import FabricCPU, NodePerRank
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


def fabric_for(args: argparse.Namespace) -> lightning.Fabric:
    if args.strategy == "none":
        return lightning.Fabric(accelerator="cpu", devices=1)
    config = {"gradient_clipping": 0.1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
    strategy = DeepSpeedStrategy(config=config) if args.strategy == "config" else args.strategy
    return lightning.Fabric(
        accelerator=FabricCPU(),
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[NodePerRank()],
        precision=args.precision,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="deepspeed_stage_2")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    fabric = fabric_for(args)
    fabric.launch()
    with fabric.init_module():
        model = network(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Before `setup`: DeepSpeed's optimizers are none of torch's, and a schedule takes no others.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(32, 16, generator=draw)
    dataset = TensorDataset(inputs, inputs.roll(1, dims=1).sin())
    sampler = DistributedSampler(dataset, fabric.world_size, fabric.global_rank, shuffle=False)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=args.batch, sampler=sampler))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": 0}

    def train(batches: list[list[torch.Tensor]]) -> list[float]:
        losses: list[float] = []
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
            fabric.backward(loss)
            if args.strategy == "none":
                fabric.clip_gradients(model, optimizer, max_norm=args.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["batches"] += 1
            losses.append(fabric.all_reduce(loss.detach().float()).item())
        return losses

    batches = list(loader)
    half = len(batches) // 2
    losses = train(batches[:half])
    facts: dict[str, Any] = {}
    if args.strategy != "none":
        fabric.save(args.out / "state", state)
        losses += train(batches[half:])
        rate = optimizer.param_groups[0]["lr"]
        state["batches"] = 0
        facts["left"] = sorted(fabric.load(args.out / "state", state))
        facts["batches"] = state["batches"]
        facts["again"] = train(batches[half:])
        from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

        engine = fabric.strategy.model
        facts |= {"engine": type(engine).__name__, "stage": engine.zero_optimization_stage()}
        facts["is_deepspeeds"] = isinstance(engine.optimizer, DeepSpeedOptimizer)
    else:
        losses += train(batches[half:])
        rate = optimizer.param_groups[0]["lr"]
    facts |= {"losses": losses, "rate": rate}
    if fabric.global_rank == 0:
        (args.out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
