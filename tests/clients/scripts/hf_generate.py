"""Trains a tiny T5 and has it generate, with Hugging Face's Seq2SeqTrainer.

Texts end at unequal lengths, and so do the ranks' answers. It takes all words of Seq2SeqTrainingArguments: with
`--do_eval` it evaluates and generates before training, with `--do_train` it trains and generates then. What it says is
written to `facts.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

WORDS = 40
PAD, END = 0, 1


@dataclass
class Words:
    pretrained: str = field(metadata={"help": "folder with the model; it is made where it is not there"})


def samples(number: int, *, seed: int) -> list[dict[str, list[int]]]:
    """A text is answered by itself, backwards."""
    draw = numpy.random.default_rng(seed)
    texts = [draw.integers(2, WORDS, size=length).tolist() for length in draw.integers(2, 9, size=number)]
    return [{"input_ids": [*text, END], "labels": [*text[::-1], END]} for text in texts]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def padded(name: str, value: int) -> torch.Tensor:
        longest = max(len(sample[name]) for sample in batch)
        return torch.tensor([sample[name] + [value] * (longest - len(sample[name])) for sample in batch])

    ids = padded("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": padded("labels", -100)}


def make(folder: str) -> None:
    set_seed(0)
    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0,
        initializer_factor=1.0,
        decoder_start_token_id=PAD,
        feed_forward_proj="gated-gelu",
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)


def main() -> None:
    words, args = HfArgumentParser((Words, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    with args.main_process_first():
        if not Path(words.pretrained).exists():
            make(words.pretrained)
    trainer = Seq2SeqTrainer(
        model=AutoModelForSeq2SeqLM.from_pretrained(words.pretrained),
        args=args,
        train_dataset=samples(32, seed=1),
        eval_dataset=samples(8, seed=2),
        data_collator=collate,
    )
    facts: dict[str, object] = {}

    def note(when: str) -> None:
        # Odd in number, so that one rank has less to do than the other.
        answers = trainer.predict(samples(7, seed=3))
        facts[when] = {
            "loss": answers.metrics["test_loss"],
            "answers": [[int(word) for word in answer if word > END] for answer in answers.predictions],
        }

    if args.do_eval:
        facts["evaluated"] = trainer.evaluate()["eval_loss"]
        note("before")
    if args.do_train:
        trainer.train()
        note("after")
        facts["log"] = trainer.state.log_history
    if trainer.is_world_process_zero():
        (Path(args.output_dir) / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
