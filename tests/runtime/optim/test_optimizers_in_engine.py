"""Every optimizer of the config trains in an engine: the same bits at every stage; checkpoints load anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import dsrun
from dsrun.config.sections.optimizer import OPTIMIZERS
from dsrun.errors import CheckpointError
from dsrun.runtime.optim.algorithms.deepspeed_classes import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

#: What knows its tensors, with parameters that make a small model meet all of its cases.
STRUCTURED: dict[str, dict[str, Any]] = {
    "Lamb": {},
    "Muon": {"adam_lr": 1e-3},
    "Adafactor": {},
    "AdamMini": {},
    "Adam8bit": {"min_8bit_size": 500},
    "Lion8bit": {"min_8bit_size": 500},
}
SAMPLES = 6
#: Learning rates at which a dozen updates show something, where Adam's does not.
RATES = {
    **dict.fromkeys(("Adagrad", "DeepSpeedCPUAdagrad", "Adafactor", "Muon", "MuonWithAuxAdam"), 0.02),
    **dict.fromkeys(("Lamb", "FusedLamb"), 0.03),
    "SGD": 0.3,
    "Adadelta": 1.0,
}
Result = tuple[list[float], dict[str, Tensor]]


def settings(name: str, stage: int, *, size: int, accumulation: int = 1, **params: Any) -> dict[str, Any]:
    made = config(stage, micro=SAMPLES // size // accumulation, accumulation=accumulation)
    return {**made, "optimizer": {"type": name, "params": {"lr": 3e-3, "weight_decay": 0.1, **params}}}


def _engine(made: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(7)
    return make_engine(made, model=TinyGPT(width=40, layers=2), **more)


def _train(cases: list[dict[str, Any]], steps: int) -> list[Result]:
    found: list[Result] = []
    for case in cases:
        engine = _engine(case)
        found.append((train(engine, range(steps), samples=SAMPLES), full_parameters(engine)))
    return found


def assert_equal(found: Result, expected: Result, what: str) -> None:
    assert found[0] == expected[0], what
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), f"{what}: {name}"


def test_stages_agree_bit_for_bit_and_with_one_rank_that_accumulates() -> None:
    stages = dict.fromkeys(STRUCTURED, (0, 1, 3)) | {"Muon": (0, 1, 2, 3)}
    keys = [(name, stage) for name, of_name in stages.items() for stage in of_name]
    two = run_ranks(2, _train, [settings(n, s, size=2, **STRUCTURED[n]) for n, s in keys], 3)[1]
    alone = run_ranks(1, _train, [settings(n, 0, size=1, accumulation=2, **STRUCTURED[n]) for n in stages], 3)[0]
    expected = dict(zip(stages, alone, strict=True))
    for (name, stage), result in zip(keys, two, strict=True):
        assert_equal(result, expected[name], f"{name} at stage {stage}")


def test_every_name_of_the_config_learns() -> None:
    for name in OPTIMIZERS.models:
        rate = RATES.get(name, 3e-3)
        (losses, _), *_ = _train([settings(name, 3, size=1, lr=rate, weight_decay=0.0)], 7)
        if name == "RAdam":  # its first updates are not divided by the second moment, and small
            assert len(set(losses)) == len(losses)
            continue
        assert min(losses[-3:]) < 0.98 * losses[0], f"{name}: {losses}"


def _save(folder: str, names: list[str]) -> list[Result]:
    found: list[Result] = []
    for name in names:
        engine = _engine(settings(name, 2, size=2, **STRUCTURED[name]))
        train(engine, range(2), samples=SAMPLES)
        engine.save_checkpoint(f"{folder}/{name}")
        found.append((train(engine, range(2, 3), samples=SAMPLES), full_parameters(engine)))
    return found


def _load(folder: str, names: list[str], stage: int, accumulation: int) -> list[Result]:
    found: list[Result] = []
    size = dsrun.init_distributed().world_size
    for name in names:
        engine = _engine(settings(name, stage, size=size, accumulation=accumulation, **STRUCTURED[name]))
        engine.load_checkpoint(f"{folder}/{name}")
        found.append((train(engine, range(2, 3), samples=SAMPLES), full_parameters(engine)))
    return found


def test_a_run_saved_on_two_ranks_goes_on_on_one_and_on_three(tmp_path: Path) -> None:
    names = list(STRUCTURED)
    saved = run_ranks(2, _save, str(tmp_path), names)[0]
    alone = run_ranks(1, _load, str(tmp_path), names, 1, 2)[0]
    three = run_ranks(3, _load, str(tmp_path), names, 3, 1)[2]
    for name, expected, one, other in zip(names, saved, alone, three, strict=True):
        assert_equal(one, expected, name)  # the same sums of gradients, so the same bits
        assert other[0] == pytest.approx(expected[0], rel=2e-3), name


def test_another_size_of_what_stays_in_32_bits_is_told(tmp_path: Path) -> None:
    engine = _engine(settings("Adam8bit", 1, size=1, min_8bit_size=500))
    engine.save_checkpoint(tmp_path)
    other = _engine(settings("Adam8bit", 1, size=1))
    with pytest.raises(CheckpointError, match=r"no exp_avg of `embed\.weight`"):
        other.load_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [
    lambda params: FusedAdam(params, lr=1e-2, adam_w_mode=False),
    lambda params: DeepSpeedCPUAdam(params, lr=1e-2, weight_decay=0.1),
    lambda params: FusedLamb(params, lr=1e-2),
    lambda params: FusedLion(params, lr=1e-3),
])  # fmt: skip
def test_deepspeeds_classes_are_taken_over_and_step_as_the_configs(make: Any) -> None:
    torch.manual_seed(7)
    model = TinyGPT(width=40, layers=2)
    optimizer = make(model.parameters())
    made = {key: value for key, value in settings("AdamW", 2, size=1).items() if key != "optimizer"}
    engine = make_engine(made, model=model, optimizer=optimizer)
    assert engine.optimizer is optimizer
    losses = train(engine, range(6), samples=SAMPLES)
    assert losses[-1] < losses[0]
    if isinstance(optimizer, DeepSpeedCPUAdam):
        (expected,) = _train([settings("AdamW", 2, size=1, lr=1e-2)], 6)
        assert losses == expected[0]


def test_a_function_may_make_any_of_them() -> None:
    made = {key: value for key, value in settings("AdamW", 3, size=1).items() if key != "optimizer"}
    for make in (lambda groups: DeepSpeedCPUAdagrad(groups, lr=1e-2), lambda groups: FusedLamb(groups, lr=1e-2)):
        engine = _engine(made, optimizer=make)
        losses = train(engine, range(4), samples=SAMPLES)
        assert losses[-1] < losses[0]


def test_plain_torch_without_an_engine_takes_them_too() -> None:
    torch.manual_seed(7)
    model = TinyGPT(width=40, layers=2)
    optimizer: optim.Optimizer = FusedLamb(model.named_parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(4):
        inputs, targets = batches(step, samples=SAMPLES)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
