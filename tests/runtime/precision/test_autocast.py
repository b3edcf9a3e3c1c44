"""Forward under the config's autocast: plain torch's bits, the same at every stage, with a loss scale for fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from support.inside_engine import store_of, units_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (0, 1, 2, 3)
STEPS = 3


def settings(stage: int, *, micro: int, dtype: str | None = None, **more: Any) -> dict[str, Any]:
    return config(stage, micro=micro, torch_autocast={"enabled": True, "dtype": dtype}, **more)


def model(**options: Any) -> nn.Module:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"width": 20, "layers": 2, **options}
    return TinyGPT(**sizes)


def _train(cases: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    dsrun.init_distributed()
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for case in cases:
        engine = make_engine(case, model=model())
        if case["zero_optimization"]["stage"] == 3:
            store_of(engine).poison = True
        found.append((train(engine, range(STEPS), samples=4), full_parameters(engine)))
    return found


def test_stages_agree_bit_for_bit_under_autocast_recomputation_included() -> None:
    cases = [settings(stage, micro=2) for stage in STAGES]
    cases.append(settings(3, micro=2, activation_checkpointing={"policy": "every_block"}))
    fp32 = config(0, micro=2)
    for *results, plain in run_ranks(2, _train, [*cases, fp32]):
        losses, weights = results[0]
        assert losses != plain[0], "autocast makes a difference"
        for number, (found, of_case) in enumerate(results):
            assert found == losses, f"case {number}"
            for name, value in weights.items():
                assert torch.equal(of_case[name], value), f"case {number}: {name}"


def test_it_is_plain_torch_under_autocast_bit_for_bit() -> None:
    sizes: dict[str, Any] = {"width": 32, "vocab": 64, "odd": 0}
    engine = make_engine(settings(3, micro=4, gradient_clipping=0), model=model(**sizes))
    found = train(engine, range(STEPS), samples=4)
    plain = model(**sizes)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    expected: list[float] = []
    for step in range(STEPS):
        inputs, targets = batches(step, samples=4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = plain(inputs)
        loss = loss_of(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert found == expected
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, dict(plain.named_parameters())[name]), name


@pytest.mark.parametrize(
    ("dtype", "expected", "scale"),
    [(None, torch.bfloat16, 1.0), ("torch.bfloat16", torch.bfloat16, 1.0), ("float16", torch.float16, 65536.0)],
)
def test_the_format_is_the_configs_and_fp16_has_a_loss_scale(
    dtype: str | None, expected: torch.dtype, scale: float
) -> None:
    engine = make_engine(settings(1, micro=2, dtype=dtype), model=nn.Linear(16, 4))
    out = engine(torch.ones(2, 16))
    assert out.dtype == expected
    assert engine.module.weight.dtype == torch.float32
    assert engine.cur_scale == scale
    for factor in (1e-3, float("inf")):
        engine.backward(engine(torch.ones(2, 16)).float().square().mean() * factor)
        engine.step()
    assert engine.skipped_steps == (1 if scale != 1.0 else 0)
    assert engine.cur_scale == (scale / 2 if scale != 1.0 else 1.0)


def test_without_the_section_the_scripts_own_autocast_holds() -> None:
    engine = make_engine(config(0, micro=2), model=nn.Linear(16, 4))
    assert engine(torch.ones(2, 16)).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert engine(torch.ones(2, 16)).dtype == torch.bfloat16


#: As DeepSpeedExamples have it: everything in bf16, and autocast around forward.
ALL_BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize("stage", [0, 3])
def test_over_a_model_in_bf16_it_is_plain_torchs_autocast_over_one_bit_for_bit(stage: int) -> None:
    sizes: dict[str, Any] = {"width": 32, "vocab": 64, "odd": 0}
    case = {**settings(stage, micro=4, gradient_clipping=0, optimizer="SGD"), "bf16": ALL_BF16}
    engine = make_engine(case, model=model(**sizes))
    found = train(engine, range(STEPS), samples=4)
    plain = model(**sizes).bfloat16()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2, weight_decay=0.1, momentum=0.9)
    expected: list[float] = []
    for step in range(STEPS):
        inputs, targets = batches(step, samples=4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = plain(inputs)
        loss = loss_of(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert found == expected
    for name, value in full_parameters(engine).items():
        assert torch.equal(value.bfloat16(), dict(plain.named_parameters())[name]), name


def test_over_a_16_bit_model_inputs_are_cast_and_the_loss_scale_is_that_of_its_section() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 3}
    engine = make_engine(settings(2, micro=2, dtype="float16", fp16=fp16), model=nn.Linear(16, 4))
    assert (engine.cur_scale, engine.module.weight.dtype) == (8.0, torch.float16)
    assert engine(torch.ones(2, 16)).dtype == torch.float16, "inputs in fp32 are cast"
    section = {"enabled": True, "lower_precision_safe_modules": ["Linear"]}
    light = make_engine(config(2, micro=2, bf16=True, torch_autocast=section), model=nn.Linear(16, 4))
    assert light(torch.ones(2, 16)).dtype == torch.bfloat16
    assert [unit.comm_dtype for unit in units_of(light)] == [None]
