"""Trains a LoRA adapter of a tiny Llama with Hugging Face's Trainer, once for each config given.

`--through sft` has TRL's SFTTrainer make the adapter. With `--pretrained` the model is read from a folder, and a copy
of its head is trained beside the adapter. `--resume FOLDER` goes on from
the third step of runs that have written there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trl_tiny
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer


def lora(**more: object) -> LoraConfig:
    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **more)


def settings(name: str, deepspeed: str | None, out: Path, *, batch: int, accumulation: int) -> dict[str, object]:
    return {
        "output_dir": str(out / name / "checkpoints"),
        "deepspeed": deepspeed,
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 1,
        "learning_rate": 2e-2,
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }


def hugging_face(texts: list[str], pretrained: str | None, **settings: object) -> Trainer:
    words = trl_tiny.tokenizer()
    samples = [{"input_ids": words(text)["input_ids"]} for text in texts]
    args = TrainingArguments(**settings)
    if pretrained is None:
        model = get_peft_model(trl_tiny.model(), lora())
    else:
        set_seed(3)
        base = AutoModelForCausalLM.from_pretrained(pretrained)
        model = get_peft_model(base, lora(modules_to_save=["lm_head"]))
    return Trainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(samples),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        processing_class=words,
    )


def sft(texts: list[str], pretrained: str | None, **settings: object) -> Trainer:
    return SFTTrainer(
        model=trl_tiny.model() if pretrained is None else pretrained,
        args=SFTConfig(**settings, bf16=False, max_length=32),
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=trl_tiny.tokenizer(),
        peft_config=lora(),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", nargs="+", default=["none"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--through", choices=["trainer", "sft"], default="trainer")
    parser.add_argument("--pretrained")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    make = sft if args.through == "sft" else hugging_face
    for name, path in trl_tiny.configs(args.deepspeed):
        trainer = make(
            trl_tiny.sentences(20, seed=1),
            args.pretrained,
            **settings(name, path, args.out, batch=args.batch, accumulation=args.accumulation),
        )
        checkpoint = None if args.resume is None else str(args.resume / name / "checkpoints/checkpoint-3")
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(args.out / name / "adapter"))
        trl_tiny.report(trainer, args.out / name)


if __name__ == "__main__":
    main()
