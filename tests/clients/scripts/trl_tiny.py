"""What the scripts of TRL and PEFT train: a tiny Llama, a tokenizer of 96 words and lists of texts, all made in memory.

It imports nothing of dsrun or DeepSpeed, as the scripts beside it: they are what users have.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, set_seed

_WORDS = 96


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>"] + [f"w{number}" for number in range(_WORDS)]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(*, seed: int = 0, tied: bool = False, layers: int = 2) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_WORDS + 3,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def sentences(number: int, *, seed: int, shortest: int = 4, longest: int = 14) -> list[str]:
    """Texts of unequal lengths; a word is followed by its neighbour more often than not, so there is much to learn."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(number):
        word = draw.randrange(_WORDS)
        words = [word]
        for _ in range(draw.randint(shortest, longest) - 1):
            word = (word + 1) % _WORDS if draw.random() < 0.8 else draw.randrange(_WORDS)
            words.append(word)
        texts.append(" ".join(f"w{each}" for each in words))
    return texts


def preferences(number: int) -> list[dict[str, str]]:
    prompts = sentences(number, seed=2, shortest=3, longest=7)
    chosen = sentences(number, seed=3, shortest=2, longest=9)
    rejected = sentences(number, seed=4, shortest=2, longest=9)
    return [
        {"prompt": prompt, "chosen": " " + better, "rejected": " " + worse}
        for prompt, better, worse in zip(prompts, chosen, rejected, strict=True)
    ]


def configs(paths: Sequence[str]) -> list[tuple[str, str | None]]:
    """Name and path of each config of a sweep; `none` trains without DeepSpeed."""
    return [(Path(path).stem, None if path == "none" else path) for path in paths]


def report(trainer: Trainer, out: Path, **more: object) -> None:
    """Writes what a training came to: its log, and the steps that the engine has done, where there is one."""
    engine = trainer.deepspeed
    facts = {
        "log": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "engine": None if engine is None else f"{type(engine).__module__}.{type(engine).__qualname__}",
        "engine_steps": None if engine is None else engine.global_steps,
        "stage": None if engine is None else engine.zero_optimization_stage(),
        "rank": trainer.args.process_index,
        "world_size": trainer.args.world_size,
        **more,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"facts-{trainer.args.process_index}.json").write_text(json.dumps(facts))


def main() -> None:
    """Saves the model and its tokenizer into a folder, as a hub has them, and preferences into a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preferences", type=Path)
    args = parser.parse_args()
    model().save_pretrained(args.folder)
    tokenizer().save_pretrained(args.folder)
    if args.preferences is not None:
        args.preferences.write_text("".join(json.dumps(sample) + "\n" for sample in preferences(20)))


if __name__ == "__main__":
    main()
