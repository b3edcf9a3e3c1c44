"""A script that looks a state up by a parameter is told where it is; shards keep theirs."""

from __future__ import annotations

import copy

import pytest
import torch

import dsrun
from dsrun.errors import ModelError
from support.training import config, make_engine, train


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_state_of_a_parameter_is_not_an_empty_dict(stage: int) -> None:
    engine = make_engine(config(stage, micro=2))
    train(engine, range(1), samples=2)
    states = engine.optimizer.state
    param = next(engine.module.parameters())
    with pytest.raises(ModelError, match="the optimizer steps flat shards") as caught:
        states[param]
    assert "safe_get_full_optimizer_state" in str(caught.value.hint)
    assert states.get(param) is None
    assert param not in states
    whole = dsrun.utils.safe_get_full_optimizer_state(param, "exp_avg")
    assert whole.shape == param.shape
    assert whole.abs().sum() > 0
    shards = [shard for group in engine.optimizer.param_groups for shard in group["params"]]
    assert [states[shard]["exp_avg"].shape for shard in shards] == [shard.shape for shard in shards]
    assert list(copy.copy(states)) == list(states)


def test_a_shard_without_states_gets_them_as_torch_makes_them() -> None:
    engine = make_engine(config(1, micro=2, optimizer="SGD"))
    shard = engine.optimizer.param_groups[0]["params"][0]
    assert engine.optimizer.state[shard] == {}
    assert engine.optimizer.state["a word"] == {}
    with pytest.raises(ModelError):
        engine.optimizer.state[torch.zeros(3)]
