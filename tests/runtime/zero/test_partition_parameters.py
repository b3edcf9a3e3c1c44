"""What a sharded parameter says of itself is true when it is said."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.zero.partition_parameters import ZeroParamStatus
from support.ranks import run_ranks
from support.training import batches, config, make_engine, train

THERE, ELSEWHERE = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


def stage_3(threshold: int, **more: Any) -> dict[str, Any]:
    settings = config(3, micro=2, **more)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    return settings


def statuses_over_a_step(offloads: bool) -> None:
    settings = stage_3(0, bf16=True)
    if offloads:
        settings["zero_optimization"] |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    engine = make_engine(settings)
    train(engine, range(2), samples=4)
    params = list(engine.module.parameters())
    first, second = engine.module.blocks[0], engine.module.blocks[1]
    seen: list[set[Any]] = []

    def look(*_: Any) -> None:
        seen.append({param.ds_status for param in second.parameters()})
        seen.append({param.ds_status for param in first.parameters()})

    second.register_forward_pre_hook(look)
    inputs = batches(2, samples=2)[0]
    assert {param.ds_status for param in params} == {ELSEWHERE}
    loss = engine(inputs).float().mean()
    assert seen[0] == {THERE}
    assert THERE not in seen[1]
    engine.backward(loss)
    assert {param.ds_status for param in params} == {ELSEWHERE}
    engine.step()
    with dsrun.zero.GatheredParameters(params[0]):
        assert [param.ds_status for param in params] == [THERE, *[ELSEWHERE] * (len(params) - 1)]
        with dsrun.zero.GatheredParameters(params[:2]):
            assert [param.ds_status for param in params[:3]] == [THERE, THERE, ELSEWHERE]
        assert [param.ds_status for param in params[:2]] == [THERE, ELSEWHERE]
    assert {param.ds_status for param in params} == {ELSEWHERE}
    assert sum(param.ds_tensor.numel() for param in params) < sum(param.ds_numel for param in params)
    assert [tuple(param.ds_shape) for param in params] == [tuple(param.shape) for param in params]
    assert sorted({param.ds_id for param in params}) == list(range(len(params)))
    params[0].ds_active_sub_modules.clear()


@pytest.mark.parametrize("offloads", [False, True])
def test_a_parameter_says_whether_its_values_are_there_now(offloads: bool) -> None:
    run_ranks(2, statuses_over_a_step, offloads)


def test_only_parameters_that_stay_whole_between_updates_persist() -> None:
    for threshold, expected in ((0, {False}), (10**9, {True})):
        engine = make_engine(stage_3(threshold))
        train(engine, range(1), samples=2)
        in_blocks = [param.ds_persist for block in engine.module.blocks for param in block.parameters()]
        assert set(in_blocks) == expected
        engine.destroy()


def test_a_piece_cannot_be_given_other_memory_and_is_a_plain_tensor_otherwise() -> None:
    engine = make_engine(stage_3(0))
    param: Any = next(engine.module.blocks[0].parameters())
    with torch.no_grad():
        param.ds_tensor.data = param.ds_tensor.data  # as ms-swift does on a machine without a GPU
        param.ds_tensor.data = param.ds_tensor.data.to("cpu")
        for other in (param.ds_tensor.clone(), param.ds_tensor.data.to("meta"), param.ds_tensor.data.bfloat16()):
            with pytest.raises(ModelError, match=r"ds_tensor\.data is set to other memory") as caught:
                param.ds_tensor.data = other
            assert "engine.offload_states()" in str(caught.value.hint)
    piece = param.ds_tensor
    assert type(piece + 1) is torch.Tensor
    assert type(copy.deepcopy(piece)) is torch.Tensor
    file = io.BytesIO()
    torch.save(piece, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), piece.data)
