"""Train a tiny Llama or BERT with Hugging Face's Trainer and a DeepSpeed config: a script such as its users have.

    dsrun --as-deepspeed -n 2 scripts/examples/hf_trainer.py --output_dir out --deepspeed configs/hf-zero3.json
    dsrun --as-deepspeed -n 2 scripts/examples/hf_trainer.py --output_dir out --deepspeed configs/hf-zero3.json \
        --resume_from_checkpoint true     # goes on from the last checkpoint in `out`

It takes all words of TrainingArguments, imports neither dsrun nor deepspeed, and loads nothing from a hub: models are
made from a config, and texts are made in memory. On a machine without a GPU, add `--use_cpu` after the script's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCABULARY = 64
LENGTH = 12


@dataclass
class ExampleArguments:
    family: str = field(default="llama", metadata={"help": "llama (next token) or bert (classes)"})
    samples: int = field(default=128, metadata={"help": "number of texts to train on"})
    tied: bool = field(default=False, metadata={"help": "one matrix for the embedding and the head of llama"})
    pretrained: str | None = field(default=None, metadata={"help": "folder with a model to start from"})


class CountingTexts(Dataset):
    """Texts that count up by one or by two from a random token; how far they count is the class of a text."""

    def __init__(self, samples: int, *, classes: bool, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (samples, 1), generator=draw)
        steps = torch.randint(1, 3, (samples, 1), generator=draw)
        self.texts = (starts + steps * torch.arange(LENGTH)) % VOCABULARY
        self.labels = steps[:, 0] - 1 if classes else self.texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[at], "labels": self.labels[at]}


def model_for(example: ExampleArguments) -> PreTrainedModel:
    kind = AutoModelForSequenceClassification if example.family == "bert" else AutoModelForCausalLM
    if example.pretrained is not None:
        return kind.from_pretrained(example.pretrained)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    if example.family == "bert":
        # Without dropout, so that runs can be compared.
        return kind.from_config(
            BertConfig(**sizes, num_attention_heads=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        )
    return kind.from_config(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=example.tied)
    )


def main() -> None:
    example, args = HfArgumentParser((ExampleArguments, TrainingArguments)).parse_args_into_dataclasses()
    classes = example.family == "bert"
    set_seed(args.seed)
    trainer = Trainer(
        model=model_for(example),
        args=args,
        train_dataset=CountingTexts(example.samples, classes=classes, seed=1),
        eval_dataset=CountingTexts(8, classes=classes, seed=2),
    )
    resume = args.resume_from_checkpoint
    metrics = trainer.train(resume_from_checkpoint=resume == "true" or resume).metrics
    if trainer.is_deepspeed_enabled:
        metrics["engine_updates"] = trainer.deepspeed.global_steps
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
