"""Which class of DeepSpeed's an engine's optimizer is an instance of, and that none of them is made by hand.

The table was recorded from DeepSpeed 0.19.8 on the CPU, with its check that refuses fp16 there taken out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import dsrun
from dsrun.errors import ModelError
from dsrun.ops.adam import FusedAdam
from dsrun.runtime.deepspeed import optimizer_types as types
from dsrun.runtime.deepspeed.offload_names import OffloadDeviceEnum, OffloadStateTypeEnum
from support.training import batches, config, make_engine, train

KINDS = (
    types.DeepSpeedOptimizer,
    types.ZeROOptimizer,
    types.DeepSpeedZeroOptimizer,
    types.DeepSpeedZeroOptimizer_Stage3,
    types.BF16_Optimizer,
    types.FP16_Optimizer,
    types.FP16_UnfusedOptimizer,
)
ZERO = {types.DeepSpeedOptimizer, types.ZeROOptimizer, types.DeepSpeedZeroOptimizer}
STAGE3 = {types.DeepSpeedOptimizer, types.ZeROOptimizer, types.DeepSpeedZeroOptimizer_Stage3}
BF16 = {types.DeepSpeedOptimizer, types.ZeROOptimizer, types.BF16_Optimizer}
UNFUSED = {types.DeepSpeedOptimizer, types.FP16_UnfusedOptimizer}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def engine_of(optimizer: type[optim.Optimizer], stage: int, dtype: str, **more: Any) -> Any:
    model = nn.Linear(16, 16)
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **more}
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    return dsrun.initialize(model=model, optimizer=optimizer(model.parameters(), lr=0.1), config=settings)[0]  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_an_optimizer_is_what_deepspeed_would_have_made_of_it(dtype: str) -> None:
    expected = {0: set() if dtype == "fp32" else UNFUSED, 1: ZERO, 2: ZERO, 3: STAGE3}
    for stage, kinds in expected.items():
        optimizer = engine_of(optim.AdamW, stage, dtype).optimizer
        assert {kind for kind in KINDS if isinstance(optimizer, kind)} == kinds, stage
        assert isinstance(optimizer, optim.AdamW)


def test_fused_adam_and_sums_in_fp32_have_classes_of_their_own() -> None:
    fused = engine_of(FusedAdam, 0, "bf16").optimizer
    assert {kind for kind in KINDS if isinstance(fused, kind)} == {types.DeepSpeedOptimizer, types.FP16_Optimizer}
    in_fp32 = engine_of(optim.SGD, 1, "bf16", **IN_FP32).optimizer
    assert {kind for kind in KINDS if isinstance(in_fp32, kind)} == BF16
    assert isinstance(engine_of(optim.SGD, 2, "bf16", **IN_FP32).optimizer, types.DeepSpeedZeroOptimizer)
    assert isinstance(engine_of(optim.SGD, 1, "fp16", **IN_FP32).optimizer, types.DeepSpeedZeroOptimizer)
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    offloaded = engine_of(optim.SGD, 1, "bf16", **IN_FP32, zero_optimization=zero).optimizer
    assert isinstance(offloaded, types.DeepSpeedZeroOptimizer)


def test_an_optimizer_without_an_engine_is_none_of_them() -> None:
    for other in (optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), None, 3, "DeepSpeedZeroOptimizer"):
        assert not any(isinstance(other, kind) for kind in KINDS), other


def test_classes_are_above_each_other_as_in_deepspeed() -> None:
    assert issubclass(types.BF16_Optimizer, types.ZeROOptimizer)
    assert issubclass(types.ZeROOptimizer, types.DeepSpeedOptimizer)
    assert not issubclass(types.FP16_Optimizer, types.ZeROOptimizer)


def test_none_of_them_is_made_by_hand() -> None:
    with pytest.raises(ModelError, match="FP16_Optimizer: it is for isinstance alone"):
        types.FP16_Optimizer(optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_which_optimizers_fit_sharded_states_is_asked_before_an_engine_is_made() -> None:
    params = [nn.Parameter(torch.zeros(2, 2))]
    assert types.is_zero_supported_optimizer(optim.AdamW(params))
    assert types.is_zero_supported_optimizer(FusedAdam(params))
    assert not types.is_zero_supported_optimizer(optim.LBFGS(params))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_leave_and_come_back_by_the_members_that_scripts_pass(stage: int) -> None:
    plain = make_engine(config(stage, micro=2, bf16=True))
    engine = make_engine(config(stage, micro=2, bf16=True))
    losses, found = train(plain, range(2), samples=2), train(engine, range(1), samples=2)
    inputs, _ = batches(9, samples=2)
    before = engine(inputs).detach().clone()
    kinds = [kind for kind in OffloadStateTypeEnum if kind is not OffloadStateTypeEnum.lp_params]
    engine.optimizer.offload_states(include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=False)
    with torch.no_grad():
        assert torch.equal(engine(inputs), before)
    with pytest.raises(ModelError, match="states are in host memory"):
        engine.backward(engine(inputs).sum())
    engine.optimizer.reload_states(non_blocking=False)
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
    engine.reload_states()
    assert found + train(engine, range(1, 2), samples=2) == losses
