"""Train a small network with Lightning's Trainer: a script such as its users have.

    dsrun --as-deepspeed -n 2 scripts/examples/lightning_fit.py --strategy deepspeed_stage_3 --precision bf16-mixed
    dsrun --as-deepspeed -n 2 scripts/examples/lightning_fit.py --strategy deepspeed_stage_2 --resume last

It imports nothing of dsrun. With `--strategy none` it trains in one process, without DeepSpeed. On a machine without a
GPU, add `--cpu`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Network(lightning.LightningModule):
    def __init__(self, *, on_host: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers: nn.Sequential | None = None
        self.log_of_steps: list[tuple[Tensor, float]] = []

    def configure_model(self) -> None:
        # Where a strategy shards parameters, each layer is cut as it is made.
        if self.layers is None:
            torch.manual_seed(5)
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_of_steps.append((loss.detach().float(), rate))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        assert self.layers is not None
        return nn.functional.mse_loss(self.layers(inputs).float(), targets.float())

    def configure_optimizers(self) -> Any:
        if self.hparams["on_host"]:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(self.parameters(), lr=0.01, weight_decay=0.01)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 16, generator=draw)
    return TensorDataset(inputs, inputs.roll(1, dims=1).sin())


def place(args: argparse.Namespace) -> dict[str, Any]:
    """Where the Trainer trains."""
    if args.strategy == "none":
        return {"accelerator": "cpu" if args.cpu else "auto", "devices": 1}
    strategy = {"strategy": args.strategy}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.cpu:
        from lightning_cpu import NodePerRank, TrainerCPU

        return strategy | {
            "accelerator": TrainerCPU(),
            "devices": 1,
            "num_nodes": world,
            "plugins": [NodePerRank()],
        }
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return strategy | {"accelerator": "gpu", "devices": local, "num_nodes": world // local}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="deepspeed_stage_2")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--resume", help="checkpoint to go on from")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    network = Network(on_host="offload" in args.strategy)
    trainer = lightning.Trainer(
        **place(args),
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulation,
        gradient_clip_val=args.clip,
        callbacks=[ModelCheckpoint(args.out, filename="{epoch}", save_top_k=1, monitor="val", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=args.out,
    )
    dataset = data(args.samples)
    # Lightning's own sampler would shuffle.
    sampler = DistributedSampler(dataset, trainer.world_size, trainer.global_rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    trainer.fit(network, loader, DataLoader(dataset, batch_size=2 * args.batch), ckpt_path=args.resume)
    means = trainer.strategy.reduce(torch.stack([loss for loss, _ in network.log_of_steps]), reduce_op="mean")
    facts = {
        "losses": means.tolist(),
        "rates": [rate for _, rate in network.log_of_steps],
        "val": trainer.callback_metrics["val"].item(),
        "updates": trainer.global_step,
        "engine_updates": getattr(trainer.strategy.model, "global_steps", None),
        "best": Path(trainer.checkpoint_callback.best_model_path).name,
    }
    facts["test"] = trainer.test(network, DataLoader(dataset, batch_size=2 * args.batch), verbose=False)[0]["test"]
    if trainer.is_global_zero:
        (args.out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
