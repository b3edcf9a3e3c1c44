"""Trains a tiny Llama with TRL's SFTTrainer, once for each config given, and saves model and log.

`--resume FOLDER` goes on from the fourth step of runs that have written there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trl_tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def train(name: str, deepspeed: str | None, out: Path, *, tied: bool, batch: int, resume: Path | None) -> None:
    args = SFTConfig(
        output_dir=str(out / name / "checkpoints"),
        deepspeed=deepspeed,
        use_cpu=True,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=5e-3,
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        max_length=32,
        seed=7,
    )
    trainer = SFTTrainer(
        model=trl_tiny.model(tied=tied),
        args=args,
        train_dataset=Dataset.from_list([{"text": text} for text in trl_tiny.sentences(36, seed=1)]),
        processing_class=trl_tiny.tokenizer(),
    )
    checkpoint = None if resume is None else str(resume / name / "checkpoints/checkpoint-4")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(out / name / "model"))
    trl_tiny.report(trainer, out / name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", nargs="+", default=["none"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    for name, path in trl_tiny.configs(args.deepspeed):
        train(name, path, args.out, tied=args.tied, batch=args.batch, resume=args.resume)


if __name__ == "__main__":
    main()
