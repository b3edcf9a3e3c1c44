"""What an engine takes over it takes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dsrun
from dsrun.errors import ModelError
from support.models import TinyGPT, loss_of
from support.training import batches, config, make_engine


def test_a_model_with_an_engine_is_refused_until_the_engine_is_destroyed() -> None:
    engine = make_engine(config(2, micro=2))
    model = engine.module
    for again, where in (
        (model, r"the model \(TinyGPT\)"),
        (nn.Sequential(model), "`0`"),
        (model.blocks[1], r"\(Block\)"),
    ):
        with pytest.raises(ModelError, match=rf"{where}.* has an engine already"):
            make_engine(config(2, micro=2), model=again)
    with pytest.raises(ModelError, match="model is an engine"):
        make_engine(config(2, micro=2), model=engine)
    engine.destroy()
    make_engine(config(2, micro=2), model=model).destroy()


def test_a_model_wrapped_by_something_else_is_refused_by_name() -> None:
    dsrun.init_distributed("gloo")
    wrapped = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises(ModelError, match=r"the model \(Distr.* is wrapped by DistributedDataParallel already"):
        make_engine(config(1, micro=2), model=wrapped)
    with pytest.raises(ModelError, match=r"`1` \(DataParallel\) is wrapped by torch\.nn\.DataParallel"):
        make_engine(config(1, micro=2), model=nn.Sequential(nn.Linear(3, 3), nn.DataParallel(nn.Linear(3, 3))))


def test_a_group_of_parameters_that_comes_later_is_refused_where_it_is_added() -> None:
    engine = make_engine(config(1, micro=2))
    with pytest.raises(ModelError, match=r"comes after dsrun\.initialize"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.1})


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_unfrozen_later_is_refused_by_name_at_the_step(stage: int) -> None:
    model: Any = TinyGPT()
    model.norm.weight.requires_grad_(False)
    engine = make_engine(config(stage, micro=2), model=model)
    inputs, targets = batches(0, samples=2)
    model.norm.weight.requires_grad_(True)
    engine.backward(loss_of(engine(inputs), targets))
    with pytest.raises(ModelError, match=r"`norm\.weight` was frozen"):
        engine.step()
