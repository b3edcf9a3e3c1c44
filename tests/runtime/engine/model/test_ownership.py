"""What an engine takes over it takes alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dsrun
from dsrun.errors import ModelError
from support.training import config, make_engine, train


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


def test_parameters_that_fit_into_no_flat_buffer_are_refused_all_at_once() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    model.register_parameter("sparse", nn.Parameter(torch.zeros(3, 3).to_sparse()))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3, dtype=torch.complex64), requires_grad=False))
    with pytest.raises(ModelError) as caught:
        make_engine(config(2, micro=2), model=model)
    assert [problem.message for problem in caught.value.problems] == [
        "model: `phase` is complex64; what is trained has to be real and dense",
        "model: `sparse` is sparse_coo; what is trained has to be real and dense",
        "model: `0.weight` is lazy: it has no shape yet",
        "model: `0.bias` is lazy: it has no shape yet",
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_whose_engine_nobody_has_any_more_gets_another_one(stage: int) -> None:
    losses: list[list[float]] = []
    for ends in ("destroy", "drop"):
        engine = make_engine(config(stage, micro=2))
        model = engine.module
        losses.append(train(engine, range(2), samples=2))
        if ends == "destroy":
            engine.destroy()
        del engine
        again = make_engine(config((stage + 2) % 4, micro=2, optimizer="SGD"), model=model)
        losses[-1] += train(again, range(2, 4), samples=2)
        with pytest.raises(ModelError, match="has an engine already"):
            make_engine(config(stage, micro=2), model=model)
        again.destroy()
    assert losses[0] == losses[1]
