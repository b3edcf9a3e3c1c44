"""What a script puts in the place of an engine's attributes and methods counts, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import dsrun
from dsrun.errors import ModelError
from support.training import config, make_engine, train

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def small(**settings: Any) -> Any:
    torch.manual_seed(0)
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, **settings}
    return dsrun.initialize(model=nn.Linear(4, 1), config=settings)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.step()


def test_a_schedule_that_a_script_sets_is_stepped_saved_and_loaded(tmp_path: Path) -> None:
    engine = small()
    engine.lr_scheduler = optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
    step(engine)
    step(engine)
    assert engine.get_lr() == [0.025]
    engine.save_checkpoint(tmp_path, tag="a")
    other = small()
    other.lr_scheduler = optim.lr_scheduler.StepLR(other.optimizer, step_size=1, gamma=0.5)
    other.load_checkpoint(tmp_path, tag="a")
    assert other.lr_scheduler.last_epoch == 2


def test_without_its_schedule_an_engine_keeps_its_rate() -> None:
    engine = small(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 4, "warmup_num_steps": 1}})
    engine.lr_scheduler = None
    rate = engine.get_lr()
    step(engine)
    assert engine.get_lr() == rate


def test_an_engine_whose_optimizer_is_taken_away_evaluates_only_and_takes_no_other() -> None:
    engine = small()
    with pytest.raises(ModelError, match="set to a SGD; the engine steps the one it was made with"):
        engine.optimizer = optim.SGD(engine.module.parameters(), lr=1.0)
    engine.optimizer = None
    assert engine.get_lr() == []
    with pytest.raises(ModelError, match="the engine has no optimizer"):
        engine.backward(engine(torch.ones(1, 4)).mean())


@pytest.mark.parametrize("by", ["engine", "script"])
def test_accumulation_steps_of_a_scripts_own_count_in_the_mean_and_at_the_boundary(by: str) -> None:
    plain, patched = small(gradient_accumulation_steps=2), small(gradient_accumulation_steps=4)
    patched.gradient_accumulation_steps = lambda: 2
    for engine in (plain, patched):
        for _ in range(4):
            loss = engine(torch.ones(1, 4)).mean()
            engine.backward(loss) if by == "engine" else loss.backward()
            engine.step()
        assert engine.global_steps == 2
    assert torch.equal(plain.module.weight, patched.module.weight)


def test_a_save_in_the_middle_of_such_a_batch_is_of_the_last_update(tmp_path: Path) -> None:
    engine = small()
    engine.gradient_accumulation_steps = lambda: 2
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(tmp_path, tag="a")
    other = small()
    other.load_checkpoint(tmp_path, tag="a")
    assert (other.global_steps, other.micro_steps) == (1, 2)


def test_null_for_managed_accumulation_is_the_default() -> None:
    engine = make_engine({**config(1, micro=1, accumulation=2), "managed_gradient_accumulation": None})
    train(engine, range(1), samples=2)
    assert (engine.micro_steps, engine.global_steps) == (2, 1)
