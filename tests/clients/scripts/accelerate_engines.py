"""Trains two networks side by side with Accelerate, and asks a third for their targets: three engines in one process.

With `--plugins` each has a DeepSpeed plugin of its own, of another stage; without, they train without DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network(seed: int) -> nn.Module:
    set_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def plugin(stage: int) -> DeepSpeedPlugin:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": stage}}
    return DeepSpeedPlugin(hf_ds_config=config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugins", action="store_true")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    PartialState(cpu=True)
    plugins = {"student": plugin(2), "critic": plugin(0), "teacher": plugin(3)} if args.plugins else None
    first = Accelerator(deepspeed_plugins=plugins)
    second = Accelerator()
    student, critic, teacher = network(1), network(2), network(3)
    loader = DataLoader(
        TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(4))), batch_size=args.batch
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    student, optimizer, loader = first.prepare(student, optimizer, loader)
    if plugins is not None:
        second.state.select_deepspeed_plugin("critic")
    other = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic, other = second.prepare(critic, other)
    if plugins is not None:
        second.state.select_deepspeed_plugin("teacher")
    teacher = Accelerator().prepare(teacher).eval()

    log: list[tuple[float, float]] = []
    for (inputs,) in loader:
        with torch.no_grad():
            targets = teacher(inputs)
        loss = nn.functional.mse_loss(student(inputs), targets)
        first.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        of_critic = nn.functional.mse_loss(critic(inputs), targets.sin())
        second.backward(of_critic)
        other.step()
        other.zero_grad()
        means = [first.gather(value.detach()).mean().item() for value in (loss, of_critic)]
        log.append((means[0], means[1]))
    if first.is_main_process:
        stages = [model.zero_optimization_stage() for model in (student, critic, teacher)] if plugins else None
        args.out.write_text(json.dumps({"log": log, "stages": stages}))
    first.end_training()


if __name__ == "__main__":
    main()
