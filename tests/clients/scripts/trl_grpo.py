"""Trains a tiny Llama with TRL's GRPOTrainer and a reward in Python, once for each config given.

The ranks generate from prompts of unequal lengths, and their completions end at unequal lengths. With a `--beta`
there is a reference model beside it, which TRL reads from the folder that the model is from, and moves towards the
model after each update.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trl_tiny
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward_even_words(completions: list[str], **_: object) -> list[float]:
    """The share of words with an even number, and a little for each word."""
    rewards: list[float] = []
    for text in completions:
        numbers = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        rewards.append(sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1) + 0.01 * len(numbers))
    return rewards


def train(name: str, deepspeed: str | None, out: Path, *, beta: float, gather: bool, pretrained: str | None) -> None:
    lengths: list[list[int]] = []

    def reward_and_note(prompts: list[str], completions: list[str], **more: object) -> list[float]:
        lengths.append([len(prompts[0].split()), *(len(text.split()) for text in completions)])
        return reward_even_words(completions, **more)

    args = GRPOConfig(
        output_dir=str(out / name / "checkpoints"),
        deepspeed=deepspeed,
        use_cpu=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=10,
        max_steps=3,
        learning_rate=5e-3,
        beta=beta,
        sync_ref_model=beta > 0,
        ref_model_sync_steps=1,
        num_iterations=1,
        ds3_gather_for_generation=gather,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        seed=7,
    )
    prompts = [{"prompt": text} for text in trl_tiny.sentences(8, seed=6, shortest=2, longest=9)]
    model = trl_tiny.model()
    # The end is often the likeliest word, so completions end at different places.
    model.lm_head.weight.data[trl_tiny.tokenizer().eos_token_id] *= 8
    trainer = GRPOTrainer(
        model=model if pretrained is None else pretrained,
        reward_funcs=reward_and_note,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=trl_tiny.tokenizer(),
    )
    trainer.train()
    trainer.save_model(str(out / name / "model"))
    trl_tiny.report(trainer, out / name, lengths=lengths, reference=type(trainer.ref_model).__qualname__)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", nargs="+", default=["none"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--pretrained")
    parser.add_argument("--no-gather", dest="gather", action="store_false")
    args = parser.parse_args()
    for name, path in trl_tiny.configs(args.deepspeed):
        train(name, path, args.out, beta=args.beta, gather=args.gather, pretrained=args.pretrained)


if __name__ == "__main__":
    main()
