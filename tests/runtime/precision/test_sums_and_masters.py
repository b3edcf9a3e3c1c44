"""Sums of gradients and masters in formats of their own: the bits of the same by hand, at every stage, as planned."""

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
from dsrun.estimate.memory.model_state import pad_units, state_bytes
from dsrun.estimate.run.settings import read_settings
from dsrun.runtime.engine.compose.describe import describe
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.utils import safe_get_full_fp32_param, safe_get_full_grad
from support.inside_engine import predicted_bytes, store_of, units_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STEPS = 3
BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "bf16 sums in a bf16 model": {**BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16 sums in an fp32 model": {"data_types": {"grad_accum_dtype": "bf16"}},
    "fp16 sums in an fp16 model": {
        "fp16": {"enabled": True, "loss_scale": 64},
        "data_types": {"grad_accum_dtype": "fp16"},
    },
    "bf16 masters, fp32 states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16 masters, fp32 states": {"fp16": {"enabled": True, "loss_scale": 64, "fp16_master_weights_and_grads": True}},
}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
#: No tensor has a vector's tail, where torch's kernels round otherwise in a flat buffer than in the tensor alone.
EVEN: dict[str, Any] = {"width": 32, "layers": 2, "vocab": 64, "odd": 0}


def settings(case: dict[str, Any], stage: int, *, accumulation: int = 3, **more: Any) -> dict[str, Any]:
    return {**config(stage, micro=2, accumulation=accumulation, **more), **case}


def model(**options: Any) -> nn.Module:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"width": 36, "layers": 2, **options}
    return TinyGPT(**sizes)


def _train(groups: list[list[dict[str, Any]]]) -> list[list[tuple[list[float], dict[str, Tensor]]]]:
    dsrun.init_distributed()
    return [[_train_one(own) for own in group] for group in groups]


def _train_one(own: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(own, model=model())
    if engine.zero_optimization_stage() == 3:
        store_of(engine).poison = True
    return train(engine, range(3), samples=8), full_parameters(engine)


def test_stages_agree_bit_for_bit_and_learn() -> None:
    """Each case without shards, with shards of the optimizer or of gradients too, and with all."""
    cases = [(case, "AdamW", (0, 1 + number % 2, 3)) for number, case in enumerate(CASES.values())]
    cases += [(case, "SGD", (0, 3)) for case in list(CASES.values())[::2]]
    groups = [
        [settings(case, stage, accumulation=2, optimizer=optimizer) for stage in stages]
        for case, optimizer, stages in cases
    ]
    for of_rank in run_ranks(2, _train, groups):
        for (case, optimizer, stages), results in zip(cases, of_rank, strict=True):
            losses, weights = results[0]
            assert losses[-1] < losses[0], "it learns"
            for stage, (found, of_stage) in zip(stages, results, strict=True):
                assert found == losses, f"{case}, {optimizer}, stage {stage}"
                for name, value in weights.items():
                    assert torch.equal(of_stage[name], value), f"{case}, {optimizer}, stage {stage}: {name}"


@EACH_CASE
def test_it_is_what_one_computes_by_hand(case: dict[str, Any]) -> None:
    unit = units_of(make_engine(settings(case, 0, gradient_clipping=0), model=model(**EVEN)))[0]
    compute, master, sums = unit.flat_param.dtype, unit.master.dtype, unit.grad_sum.dtype
    scale = 64.0 if compute == torch.float16 else 1.0
    engine = make_engine(settings(case, 1, gradient_clipping=0), model=model(**EVEN))
    found = train(engine, range(STEPS), samples=6)

    plain = model(**EVEN).to(compute)
    masters = {name: param.detach().to(master) for name, param in model(**EVEN).named_parameters()}
    leaves = {name: nn.Parameter(value.float()) for name, value in masters.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=1e-2, weight_decay=0.1, fused=True)
    expected: list[float] = []
    for step in range(STEPS):
        inputs, targets = batches(step, samples=6)
        added: dict[str, Tensor] = {}
        total = 0.0
        for micro in range(3):
            part = slice(2 * micro, 2 * micro + 2)
            loss = loss_of(plain(inputs[part]), targets[part])
            total += float(loss.detach())
            plain.zero_grad()
            ((loss / 3).float() * scale).backward()
            for name, param in plain.named_parameters():
                assert param.grad is not None
                grad = param.grad.detach().float()
                added[name] = (added[name].float() + grad if name in added else grad).to(sums)
        for name, leaf in leaves.items():
            leaf.data.copy_(masters[name])
            leaf.grad = added[name].float() / scale
        optimizer.step()
        for name, param in plain.named_parameters():
            masters[name] = leaves[name].detach().to(master)
            param.data.copy_(masters[name])
        expected.append(total / 3)
    assert found == expected
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, masters[name].float()), name


@EACH_CASE
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_holds_as_many_bytes_as_predicted_and_planned(case: dict[str, Any], stage: int) -> None:
    planned = read_settings(load(settings(case, stage)), ranks=1)
    expected = state_bytes(pad_units(describe(model()).units, 1), planned).total
    engine = make_engine(settings(case, stage), model=model())
    train(engine, range(1), samples=6)
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}
    counts = 4 * sum(1 for value in states if not value.dim())
    assert engine.model_state_bytes() == predicted_bytes(engine) + counts
    assert predicted_bytes(engine) == expected


@EACH_CASE
def test_a_run_goes_on_from_a_checkpoint_at_another_stage_bit_for_bit(case: dict[str, Any], tmp_path: Path) -> None:
    whole = make_engine(settings(case, 0), model=model())
    expected = train(whole, range(4), samples=6)
    stopped = make_engine(settings(case, 3), model=model())
    before = train(stopped, range(2), samples=6)
    stopped.save_checkpoint(tmp_path)
    resumed = make_engine(settings(case, 2), model=model(), seed=8)
    resumed.load_checkpoint(tmp_path)
    assert before + train(resumed, range(2, 4), samples=6) == expected
    for name, value in full_parameters(whole).items():
        assert torch.equal(full_parameters(resumed)[name], value), name


@EACH_CASE
def test_scripts_read_fp32(case: dict[str, Any]) -> None:
    engine = make_engine(settings(case, 1, accumulation=1), model=model())
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets))
    param = dict(engine.module.named_parameters())["head.weight"]
    grad, master = safe_get_full_grad(param), safe_get_full_fp32_param(param)
    assert grad is not None
    assert master is not None
    assert (grad.dtype, master.dtype) == (torch.float32, torch.float32)
    assert bool(grad.any())


@pytest.mark.parametrize(
    ("case", "kind"), list(zip(CASES.values(), ["SGD", "RMSprop", "Adagrad", "Lion", "RMSprop"], strict=True))
)
def test_other_elementwise_optimizers_keep_fp32_states_and_stages_agree(case: dict[str, Any], kind: str) -> None:
    found: list[list[float]] = []
    for stage in (0, 3):
        own = settings(case, stage, accumulation=1)
        own["optimizer"] = {"type": kind, "params": {"lr": 1e-3}}
        engine = make_engine(own, model=model())
        found.append(train(engine, range(2), samples=2))
        states = [value for state in engine.optimizer.state.values() for value in state.values()]
        assert {value.dtype for value in states if isinstance(value, Tensor)} <= {torch.float32}
    assert found[0] == found[1]


@EACH_CASE
def test_an_optimizer_of_a_script_that_sees_all_tensors_at_once_is_refused(case: dict[str, Any]) -> None:
    without = {key: value for key, value in settings(case, 1).items() if key != "optimizer"}
    with pytest.raises(ModelError, match="Lamb is not known to step leaf by leaf"):
        make_engine(without, model=model(), optimizer=partial(Lamb, lr=1e-3))


def test_an_infinity_in_narrow_sums_skips_the_step_and_names_the_parameter() -> None:
    case = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine = make_engine(
        {**settings(case, 1, accumulation=1), "data_types": {"grad_accum_dtype": "fp16"}}, model=model()
    )
    before = full_parameters(engine)
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets) * 1e8)
    engine.step()
    assert (engine.skipped_steps, engine.cur_scale) == (1, 8.0)
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, before[name]), name
