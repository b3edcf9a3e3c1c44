"""Other ways to use Lightning's DeepSpeed strategy than the example's, one after the other; each writes its facts.

    lightning_cases.py --plain FILE --out FOLDER

`FILE` is a checkpoint that the example has saved without DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning_cpu import NodePerRank, TrainerCPU
from lightning_fit import Network, data
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def trainer_of(strategy: str | DeepSpeedStrategy, **more: Any) -> lightning.Trainer:
    """A trainer that keeps no checkpoints."""
    return lightning.Trainer(
        accelerator=TrainerCPU(),
        devices=1,
        num_nodes=WORLD,
        plugins=[NodePerRank()],
        strategy=strategy,
        **{"max_epochs": 1} | more,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader(*, batch: int = 2) -> DataLoader[Any]:
    dataset = data(32)
    return DataLoader(dataset, batch_size=batch, sampler=DistributedSampler(dataset, WORLD, RANK, shuffle=False))


def losses_of(trainer: lightning.Trainer, network: Network) -> list[float]:
    return trainer.strategy.reduce(torch.stack([loss for loss, _ in network.log_of_steps]), reduce_op="mean").tolist()


class ByHand(Network):
    """Takes the steps of its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()


def by_hand(args: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for strategy in ("deepspeed_stage_2", "deepspeed_stage_3"):
        for kind in (Network, ByHand):
            network, trainer = kind(), trainer_of(strategy)
            trainer.fit(network, loader())
            facts[f"{strategy} {kind.__name__}"] = [losses_of(trainer, network), trainer.strategy.model.global_steps]
    return facts


def whole_weights(args: argparse.Namespace) -> dict[str, Any]:
    """Tests and goes on from a file of whole weights at stage 3."""
    network = Network()
    trainer = trainer_of(DeepSpeedStrategy(stage=3, load_full_weights=True))
    tested = trainer.test(network, loader(), ckpt_path=args.plain, verbose=False)[0]["test"]
    network = Network()
    trainer = trainer_of(DeepSpeedStrategy(stage=3, load_full_weights=True), max_epochs=3)
    trainer.fit(network, loader(), ckpt_path=args.plain)
    return {"tested": tested, "losses": losses_of(trainer, network), "epoch": trainer.current_epoch}


def config_file(args: argparse.Namespace) -> dict[str, Any]:
    """The optimizer and the schedule stand in a file."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    path = args.out / f"ds-{RANK}.json"
    path.write_text(json.dumps(config))
    network, trainer = Network(), trainer_of(DeepSpeedStrategy(config=str(path)), gradient_clip_val=0.5)
    trainer.fit(network, loader())
    return {"losses": losses_of(trainer, network), "rates": [rate for _, rate in network.log_of_steps]}


def two_trainers(args: argparse.Namespace) -> dict[str, Any]:
    """Another trainer tests, and a third one trains, the network of a first one that is still there."""
    network, first = Network(), trainer_of("deepspeed_stage_3")
    first.fit(network, loader())
    second = trainer_of("deepspeed_stage_3")
    tested = second.test(network, loader(), verbose=False)[0]["test"]
    third = trainer_of("deepspeed_stage_3")
    third.fit(network, loader())
    return {"tested": tested, "losses": losses_of(third, network)}


def weights(args: argparse.Namespace) -> dict[str, Any]:
    """A saved checkpoint becomes one file, which loads without DeepSpeed."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    facts: dict[str, Any] = {}
    for stage in (2, 3):
        network, trainer = Network(), trainer_of(f"deepspeed_stage_{stage}")
        trainer.fit(network, loader())
        trainer.save_checkpoint(args.out / f"saved-{stage}")
        with deepspeed.zero.GatheredParameters(list(network.parameters())):
            trained = {name: param.detach().clone() for name, param in network.named_parameters()}
        if RANK == 0:
            file = args.out / f"whole-{stage}.pt"
            convert_zero_checkpoint_to_fp32_state_dict(args.out / f"saved-{stage}", file)
            state = torch.load(file, weights_only=False)
            facts[f"epoch {stage}"] = state["epoch"]
            facts[f"equal {stage}"] = {name: torch.equal(state["state_dict"][name], trained[name]) for name in trained}
    return facts


CASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    case.__name__: case for case in (by_hand, whole_weights, config_file, two_trainers, weights)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for case in args.cases:
        facts = CASES[case](args)
        if RANK == 0:
            (args.out / f"{case}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
