"""Trains a LoRA adapter with TRL's DPOTrainer, once for each config given: the reference is the model without it.

TRL switches the adapter off for that in each step, whose parameters PEFT then freezes until it is on again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trl_tiny
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer


def train(name: str, deepspeed: str | None, out: Path, *, batch: int) -> None:
    args = DPOConfig(
        output_dir=str(out / name / "checkpoints"),
        deepspeed=deepspeed,
        use_cpu=True,
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=5e-2,
        beta=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        max_length=32,
        seed=7,
    )
    trainer = DPOTrainer(
        model=trl_tiny.model(),
        args=args,
        train_dataset=Dataset.from_list(trl_tiny.preferences(20)),
        processing_class=trl_tiny.tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(out / name / "adapter"))
    trl_tiny.report(trainer, out / name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", nargs="+", default=["none"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()
    for name, path in trl_tiny.configs(args.deepspeed):
        train(name, path, args.out, batch=args.batch)


if __name__ == "__main__":
    main()
