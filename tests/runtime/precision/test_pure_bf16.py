"""bf16 without fp32 masters: all that a parameter has is bf16, the same at every stage, in as many bytes as planned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.config.load import load
from dsrun.errors import ModelError
from dsrun.estimate.run.settings import read_settings
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.utils import safe_get_full_fp32_param, safe_get_full_grad
from support.inside_engine import predicted_bytes, store_of, units_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (0, 1, 2, 3)
STEPS = 8
PURE = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def settings(stage: int, *, micro: int = 2, **more: Any) -> dict[str, Any]:
    return {**config(stage, micro=micro, **more), "bf16": PURE}


def model() -> nn.Module:
    torch.manual_seed(7)
    return TinyGPT(width=36, layers=2)


def _train(optimizer: str, accumulation: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    dsrun.init_distributed()
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for stage in STAGES:
        case = settings(stage, optimizer=optimizer, accumulation=accumulation)
        engine = make_engine(case, model=model())
        if stage == 3:
            store_of(engine).poison = True
        found.append((train(engine, range(STEPS), samples=4 * accumulation), full_parameters(engine)))
    return found


@pytest.mark.parametrize(("optimizer", "accumulation"), [("AdamW", 1), ("SGD", 2)])
def test_stages_agree_bit_for_bit_and_learn(optimizer: str, accumulation: int) -> None:
    for results in run_ranks(2, _train, optimizer, accumulation):
        losses, weights = results[0]
        assert losses[-1] < losses[0], "it learns"
        for stage, (found, of_stage) in enumerate(results):
            assert found == losses, f"stage {stage}"
            for name, value in weights.items():
                assert torch.equal(of_stage[name], value), f"stage {stage}: {name}"


@pytest.mark.parametrize("stage", STAGES)
def test_there_are_no_masters_and_all_else_is_bf16_in_as_many_bytes_as_predicted(stage: int) -> None:
    engine = make_engine(settings(stage), model=model())
    train(engine, range(1), samples=2)
    for unit in units_of(engine):
        assert unit.master.data_ptr() == unit.shard.data_ptr(), "a parameter is its own master"
        assert unit.grad_sum.dtype == torch.bfloat16
    states = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim()]
    assert {value.dtype for value in states} == {torch.bfloat16}
    counts = [value for state in engine.optimizer.state.values() for value in state.values() if not value.dim()]
    assert engine.model_state_bytes() == predicted_bytes(engine) + 4 * len(counts)


def test_the_plan_counts_two_bytes_for_each_kind() -> None:
    found = read_settings(load(settings(1)), ranks=1)
    assert (found.compute_bytes, found.master_bytes, found.has_master) == (2, 2, False)
    assert found.states_of(1000) == 4000
    usual = read_settings(load(config(1, micro=2, bf16=True)), ranks=1)
    assert (usual.master_bytes, usual.has_master, usual.states_of(1000)) == (4, True, 8000)


@pytest.mark.parametrize("stage", [0, 3])
def test_norms_are_those_of_the_gradients_in_fp32_and_scripts_read_fp32(stage: int) -> None:
    engine = make_engine(settings(stage), model=model())
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets))
    params = dict(engine.module.named_parameters())
    grads = {name: safe_get_full_grad(param) for name, param in params.items()}
    assert {grad.dtype for grad in grads.values() if grad is not None} == {torch.float32}
    expected = sum(float(grad.double().square().sum()) for grad in grads.values() if grad is not None) ** 0.5
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-6)
    master = safe_get_full_fp32_param(params["head.weight"])
    assert master is not None
    assert master.dtype == torch.float32
    assert torch.equal(master, full_parameters(engine)["head.weight"])


def test_a_run_goes_on_from_a_checkpoint_at_another_stage_bit_for_bit(tmp_path: Path) -> None:
    whole = make_engine(settings(0), model=model())
    expected = train(whole, range(6), samples=2)
    stopped = make_engine(settings(3), model=model())
    before = train(stopped, range(3), samples=2)
    stopped.save_checkpoint(tmp_path)
    resumed = make_engine(settings(1), model=model(), seed=8)
    resumed.load_checkpoint(tmp_path)
    assert before + train(resumed, range(3, 6), samples=2) == expected
    for name, value in full_parameters(whole).items():
        assert torch.equal(full_parameters(resumed)[name], value), name


def test_an_optimizer_of_a_script_that_needs_fp32_is_refused() -> None:
    without = {key: value for key, value in settings(1).items() if key != "optimizer"}
    with pytest.raises(ModelError, match="is bfloat16; expected contiguous fp32"):
        make_engine(without, model=model(), optimizer=partial(Lamb, lr=1e-3))
