"""12 steps are 6, an end, a resume and 6 more: bit for bit on the same ranks, and the same samples on others.

Workers of loaders, and processes that are killed, are tests/e2e/test_resume_exact.py's.

[Note: bound on other ranks] With the same micro batches, other ranks add the same n gradients in another order. Two
sums of n numbers differ by at most 2 n u times the sum of their magnitudes, u = 2^-24 for fp32 (test_exactness.py).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from support.models import CONTEXT, VOCAB, TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import accumulated_gradients, config, full_parameters, make_engine

SAMPLES = 23
#: Steps before the end, and after it: an epoch ends in both.
HALF = 6
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    # The first steps overflow, and a window of 3 has the scale grow again: all of the scaler's state is in use.
    "fp16": {
        "fp16": {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 2},
    },
}
SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 40, "warmup_num_steps": 6}}


class Noisy(nn.Module):
    """A model whose forward draws from every generator: dropout, numpy, and Python's."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = TinyGPT(width=40, layers=2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits = self.dropout(self.inner(tokens_BT))
        if self.dropout.p:
            logits = logits * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())
        return logits


class Augmented(Dataset[Any]):
    """Tokens, of which a random one is another at each look, and the sample's number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        tokens = torch.randint(0, VOCAB, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        tokens[random.randrange(CONTEXT)] = int(torch.randint(0, VOCAB, ()))
        return tokens[:-1], tokens[1:], index


def make(stage: int, precision: str, *, accumulation: int, micro: int, dropout: float, seed: int = 7) -> Any:
    """An engine with data, a schedule and everything else; `seed` decides what a resume has to overwrite."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    settings = config(stage, micro=micro, accumulation=accumulation, scheduler=SCHEDULE, **PRECISIONS[precision])
    engine = make_engine(settings, model=Noisy(dropout), seed=seed, training_data=Augmented())
    # A script that gives each rank numbers of its own.
    torch.manual_seed(seed + engine.global_rank)
    return engine


Step = tuple[list[float], list[int]]


def take(engine: Any, steps: int, *, stop_in: int = 0) -> list[Step]:
    """Takes optimizer steps, and then so many micro steps of the next: this rank's losses and samples of each step."""
    found: list[Step] = [([], [])]
    while True:
        for inputs, targets, numbers in engine.training_dataloader:
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            found[-1][0].append(float(loss.detach()))
            found[-1][1].extend(numbers.tolist())
            if boundary:
                found.append(([], []))
            if len(found) > steps and len(found[-1][0]) == stop_in:
                return found if stop_in else found[:-1]


def state_of(engine: Any) -> dict[str, Any]:
    """What two runs that are the same have in common at their end."""
    return {
        "weights": {name: value.tolist() for name, value in full_parameters(engine).items()},
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps),
        "scale": engine.cur_scale,
        "schedule": (engine.get_lr(), engine.lr_scheduler.state_dict()),
        "data": engine.training_dataloader.state_dict(),
        "draws": (random.random(), np.random.rand(), float(torch.rand(()))),
    }


def _first_half(
    folder: str, stop_in: int, more: int, arguments: dict[str, Any]
) -> tuple[list[Step], list[Step], dict[str, Any]]:
    """Steps and `stop_in` micro steps, a checkpoint, and the rest: this is the undisturbed run too."""
    engine = make(**arguments)
    before = take(engine, HALF, stop_in=stop_in)
    engine.save_checkpoint(folder)
    after = take(engine, more)
    if stop_in:
        # The step that was begun before the checkpoint belongs to what comes after it.
        losses, numbers = before.pop()
        after[0] = (losses + after[0][0], numbers + after[0][1])
    return before, after, state_of(engine)


def _second_half(folder: str, more: int, arguments: dict[str, Any]) -> tuple[list[Step], dict[str, Any]]:
    engine = make(**arguments, seed=99)
    engine.load_checkpoint(folder)
    return take(engine, more), state_of(engine)


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "stop_in"),
    [(0, "fp32", 1, 0), (1, "fp16", 2, 0), (2, "bf16", 3, 2), (3, "fp16", 3, 0), (3, "fp32", 2, 1)],
)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Any, stage: int, precision: str, accumulation: int, stop_in: int
) -> None:
    arguments = {
        "stage": stage,
        "precision": precision,
        "accumulation": accumulation,
        "micro": 2,
        "dropout": 0.2,
    }
    undisturbed = run_ranks(2, _first_half, str(tmp_path), stop_in, HALF, arguments)
    resumed = run_ranks(2, _second_half, str(tmp_path), HALF, arguments)
    for (_, after, end), (found, state) in zip(undisturbed, resumed, strict=True):
        assert found == after
        assert state == end
    steps, _, skipped, micro_steps = undisturbed[0][2]["counters"]
    assert (steps, micro_steps) == (2 * HALF, 2 * HALF * accumulation)
    assert (skipped > 0) == (precision == "fp16"), "there is something of the scaler's to resume"
    draws = [end["draws"] for _, _, end in undisturbed]
    assert draws[0][2] != draws[1][2], "each rank has had a generator of its own"


def together(ranks: list[list[Step]], micro: int) -> list[list[int]]:
    """The samples of each step in their global order: (micro step, rank)."""
    found: list[list[int]] = []
    for step in zip(*ranks, strict=True):
        rows = [[numbers[first : first + micro] for first in range(0, len(numbers), micro)] for _, numbers in step]
        found.append([number for row in zip(*rows, strict=True) for part in row for number in part])
    return found


@pytest.mark.parametrize(("size", "micro", "accumulation"), [(1, 3, 4), (3, 2, 2), (4, 3, 1)])
def test_other_ranks_go_on_with_the_same_global_batches_over_the_ends_of_epochs(
    tmp_path: Any, size: int, micro: int, accumulation: int
) -> None:
    arguments = {"stage": 2, "precision": "fp32", "dropout": 0.2}
    before = run_ranks(2, _first_half, str(tmp_path), 0, HALF, {**arguments, "micro": 3, "accumulation": 2})
    other = {**arguments, "micro": micro, "accumulation": accumulation}
    resumed = run_ranks(size, _second_half, str(tmp_path), HALF, other)
    batches = together([steps for steps, _ in resumed], micro)
    assert batches == together([after for _, after, _ in before], 3)
    assert all(len(batch) == 12 for batch in batches)
    expected = before[0][2]
    for _, end in resumed:
        for key in ("data", "schedule", "scale"):
            assert end[key] == expected[key]
        assert end["counters"][:3] == expected["counters"][:3]
    # Masks are other ones, and nothing else: the runs learn alike.
    last = [sum(sum(losses) for losses, _ in steps[-5:]) for steps, _ in resumed]
    undisturbed = [sum(sum(losses) for losses, _ in after[-5:]) for _, after, _ in before]
    assert sum(last) / (5 * size * accumulation) == pytest.approx(sum(undisturbed) / (5 * 2 * 2), rel=0.1)


def _gradients_of_the_next_batch(
    folder: str, accumulation: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """What is accumulated before the first update after a resume, the sum of its magnitudes, and this rank's losses."""
    engine = make(1, "fp32", accumulation=accumulation, micro=3, dropout=0.0, seed=99)
    engine.load_checkpoint(folder)
    plain = TinyGPT(width=40, layers=2)
    plain.load_state_dict({n.removeprefix("inner."): v for n, v in full_parameters(engine).items()}, strict=False)
    magnitudes = {f"inner.{name}": torch.zeros_like(param) for name, param in plain.named_parameters()}
    losses: list[float] = []
    batches = iter(engine.training_dataloader)
    for number in range(accumulation):
        inputs, targets, _ = next(batches)
        loss = loss_of(engine(inputs), targets)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        plain.zero_grad()
        loss_of(plain(inputs), targets).backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            magnitudes[f"inner.{name}"] += param.grad.abs()
        if number < accumulation - 1:
            engine.step()
    for value in magnitudes.values():
        dist.all_reduce(value)
        value /= accumulation * dist.get_world_size()
    return accumulated_gradients(engine), magnitudes, losses


def test_the_first_gradients_on_other_ranks_are_within_the_bound(tmp_path: Any) -> None:
    arguments = {"stage": 1, "precision": "fp32", "dropout": 0.0, "micro": 3, "accumulation": 2}
    run_ranks(2, _first_half, str(tmp_path), 0, 0, arguments)
    same = run_ranks(2, _gradients_of_the_next_batch, str(tmp_path), 2)[0]
    alone = run_ranks(1, _gradients_of_the_next_batch, str(tmp_path), 4)[0]
    four = run_ranks(4, _gradients_of_the_next_batch, str(tmp_path), 1)[0]
    for found in (alone, four):
        for name, expected in same[0].items():
            # See [Note: bound on other ranks].
            bound = 2 * 4 * 2**-24 * found[1][name]
            assert bool(((found[0][name] - expected).abs() <= bound).all()), name
