"""Fine-tune an adapter of a language model with TRL and PEFT: a script such as their users have.

    dsrun --as-deepspeed scripts/examples/lora_sft.py --model FOLDER --texts texts.jsonl \
        --output_dir out --deepspeed configs/hf-zero3.json

FOLDER holds a model and its tokenizer, texts.jsonl a line `{"text": "..."}` for each text. It takes all words of
SFTConfig, and imports neither dsrun nor deepspeed. On a machine without a GPU, add `--use_cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class ExampleArguments:
    model: str = field(metadata={"help": "folder or name of a model with its tokenizer"})
    texts: str = field(metadata={"help": "file of texts, one JSON object with `text` a line"})
    rank: int = field(default=8, metadata={"help": "rank of the adapter"})


def main() -> None:
    example, args = HfArgumentParser((ExampleArguments, SFTConfig)).parse_args_into_dataclasses()
    trainer = SFTTrainer(
        model=example.model,
        args=args,
        train_dataset=load_dataset("json", data_files=example.texts, split="train"),
        peft_config=LoraConfig(r=example.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
