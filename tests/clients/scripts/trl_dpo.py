"""Trains a tiny Llama with TRL's DPOTrainer against a reference model of its own, once for each config given.

With `--data` the preferences are read from a file, and what the reference says of them is computed before training:
TRL's ranks share a file's cache for that, and have none in common of a list.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trl_tiny
from datasets import Dataset, load_dataset
from trl import DPOConfig, DPOTrainer


def from_file(path: str) -> Dataset:
    return load_dataset("json", data_files=path, split="train")


def train(name: str, deepspeed: str | None, out: Path, *, batch: int, data: str | None, pretrained: str | None) -> None:
    args = DPOConfig(
        output_dir=str(out / name / "checkpoints"),
        deepspeed=deepspeed,
        use_cpu=True,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        num_train_epochs=1,
        learning_rate=5e-3,
        beta=0.5,
        logging_steps=1,
        eval_strategy="steps" if data is None else "no",
        eval_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        max_length=32,
        precompute_ref_log_probs=data is not None,
        seed=7,
    )
    trainer = DPOTrainer(
        model=trl_tiny.model() if pretrained is None else pretrained,
        # Not the policy's own weights, so a reference that is read wrongly changes the first loss already.
        ref_model=trl_tiny.model(seed=5) if pretrained is None else None,
        args=args,
        train_dataset=Dataset.from_list(trl_tiny.preferences(20)) if data is None else from_file(data),
        eval_dataset=Dataset.from_list(trl_tiny.preferences(4)) if data is None else None,
        processing_class=trl_tiny.tokenizer(),
    )
    trainer.train()
    trainer.save_model(str(out / name / "model"))
    trl_tiny.report(trainer, out / name, reference=type(trainer.ref_model).__qualname__)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", nargs="+", default=["none"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pretrained")
    parser.add_argument("--data")
    args = parser.parse_args()
    for name, path in trl_tiny.configs(args.deepspeed):
        train(name, path, args.out, batch=args.batch, data=args.data, pretrained=args.pretrained)


if __name__ == "__main__":
    main()
