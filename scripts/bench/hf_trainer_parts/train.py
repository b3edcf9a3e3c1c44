"""Trains a small Llama with Hugging Face's Trainer, as people write it: with a DeepSpeed config, or without one by DDP.

    PYTHON train.py --deepspeed ds.json --max_steps 30 ...            (the ranks' variables in the environment)

It imports neither dsrun nor DeepSpeed: what Transformers finds under that name is the contender. The words are those of
TrainingArguments and the sizes below. The one thing of the benchmark in it is a callback, see turns.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from turns import Turns

#: Tokens that occur, and how often the next one is any of them.
_WORDS = 64
_BY_CHANCE = 0.2
_HEAD_WIDTH = 32
_SAMPLES = 4096


@dataclass
class Sizes:
    """A Llama, and the tokens of a sample. See jobs.Shape, which has the same."""

    hidden: int
    layers: int
    vocab: int
    tokens: int


class Successors(Dataset[dict[str, Tensor]]):
    """Samples in which a token is followed by its neighbour more often than not, so that there is much to learn."""

    def __init__(self, number: int, tokens: int) -> None:
        draw = torch.Generator().manual_seed(0)
        strides = torch.where(
            torch.rand(number, tokens, generator=draw) < _BY_CHANCE,
            torch.randint(_WORDS, (number, tokens), generator=draw),
            torch.ones(number, tokens, dtype=torch.int64),
        )
        self._ids = strides.cumsum(1) % _WORDS

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def main() -> None:
    """Trains."""
    parser = HfArgumentParser((TrainingArguments, Sizes))  # pyright: ignore[reportArgumentType]
    args, sizes = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 11 // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // _HEAD_WIDTH,
        num_key_value_heads=sizes.hidden // _HEAD_WIDTH,
        max_position_embeddings=sizes.tokens,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Successors(_SAMPLES, sizes.tokens),
    )
    trainer.add_callback(Turns(lambda: type(trainer.model_wrapped)))  # pyright: ignore[reportUnknownLambdaType]
    trainer.train()


if __name__ == "__main__":
    main()
