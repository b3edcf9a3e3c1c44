"""Train a small network with a loop of one's own on Hugging Face's Accelerate: a script such as its users have.

    dsrun --as-deepspeed -n 2 scripts/examples/accelerate_loop.py --config configs/zero3.json
    dsrun --as-deepspeed -n 2 scripts/examples/accelerate_loop.py --stage 2 --accumulation 3
    dsrun --as-deepspeed -n 2 scripts/examples/accelerate_loop.py --stage 2 --accumulation 3 --resume out/epoch-0

It imports neither dsrun nor deepspeed. With neither `--config` nor `--stage` it trains without DeepSpeed, unless
`accelerate launch --use_deepspeed` has started it. A file that names an optimizer gets Accelerate's stand-in for one.
On a machine without a GPU, add `--cpu`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, set_seed
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def plugin_for(args: argparse.Namespace) -> DeepSpeedPlugin | None:
    if args.config is not None:
        return DeepSpeedPlugin(hf_ds_config=args.config)
    if args.stage is None:
        return None
    # As of a program: no file is named, and clipping is in the plugin's own words.
    return DeepSpeedPlugin(
        zero_stage=args.stage, gradient_accumulation_steps=args.accumulation, gradient_clipping=args.clip
    )


def data(samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 16, generator=draw)
    return TensorDataset(inputs, inputs.roll(1, dims=1).sin())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="DeepSpeed config")
    parser.add_argument("--stage", type=int, help="ZeRO stage, without a config")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()

    set_seed(5)
    if args.cpu:
        # `Accelerator(cpu=True)` would train without DeepSpeed; and without this it counts one process where no GPU is.
        PartialState(cpu=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7),
        deepspeed_plugin=plugin_for(args),
    )
    plugin = accelerator.state.deepspeed_plugin
    config = {} if plugin is None else plugin.deepspeed_config
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    loader = DataLoader(data(args.samples), batch_size=args.batch, shuffle=True)
    updates = args.epochs * -(-args.samples // (args.batch * accelerator.num_processes * args.accumulation))
    if "optimizer" in config:
        optimizer = DummyOptim(model.parameters(), lr=1e-2)
        # Accelerate divides this by the number of ranks; a scheduler of the file takes one step an update.
        scheduler = DummyScheduler(optimizer, total_num_steps=updates * accelerator.num_processes, warmup_num_steps=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        # Accelerate takes as many steps of it an update as there are ranks.
        steps = updates * accelerator.num_processes
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    began = 0
    if args.resume is not None:
        accelerator.load_state(str(args.resume))
        began = int(args.resume.name.removeprefix("epoch-")) + 1
    log: list[dict[str, float]] = []
    for epoch in range(began, args.epochs):
        loader.set_epoch(epoch)
        losses: list[torch.Tensor] = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                losses.append(accelerator.gather(loss.detach()).mean())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
                    lr = optimizer.param_groups[0]["lr"]
                    log.append({"loss": torch.stack(losses).mean().item(), "norm": float(norm), "lr": lr})
                    losses.clear()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(str(args.out / f"epoch-{epoch}"))

    weights = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(weights, str(args.out / "model.safetensors"), safe_serialization=True)
        facts = {
            "log": log,
            "kind": str(accelerator.distributed_type),
            "class": type(accelerator.unwrap_model(model)).__name__,
            "updates": getattr(model, "global_steps", None),
        }
        (args.out / "facts.json").write_text(json.dumps(facts))
    accelerator.free_memory()


if __name__ == "__main__":
    main()
