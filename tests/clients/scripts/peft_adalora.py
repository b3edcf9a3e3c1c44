"""Trains an AdaLoRA adapter of a tiny Llama with Hugging Face's Trainer, once for each config given.

After each update a callback has PEFT rank the directions by weight and gradient, and mask those beyond the budget, as
PEFT's guide says.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trl_tiny
from datasets import Dataset
from peft import AdaLoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class Allocate(TrainerCallback):
    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        more["model"].base_model.update_and_allocate(state.global_step)


def train(name: str, deepspeed: str | None, out: Path, *, batch: int) -> None:
    words = trl_tiny.tokenizer()
    samples = [{"input_ids": words(text)["input_ids"]} for text in trl_tiny.sentences(32, seed=1)]
    config = AdaLoraConfig(
        init_r=4,
        target_r=2,
        tinit=1,
        tfinal=2,
        deltaT=2,
        total_step=8,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    trainer = Trainer(
        model=get_peft_model(trl_tiny.model(), config),
        args=TrainingArguments(
            output_dir=str(out / name / "checkpoints"),
            deepspeed=deepspeed,
            use_cpu=True,
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            learning_rate=2e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=7,
        ),
        train_dataset=Dataset.from_list(samples),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        callbacks=[Allocate()],
    )
    trainer.train()
    trainer.save_model(str(out / name / "adapter"))
    trl_tiny.report(trainer, out / name, ranks=trainer.model.peft_config["default"].rank_pattern)


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
