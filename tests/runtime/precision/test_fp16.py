"""Training in fp16: the same bits at every stage, overflows that cost a step and nothing else, and exact resumption.

torch's fp16 is slow on a CPU, so models are as small as they can be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.contract.environment import RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import ModelError
from support.inside_engine import store_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (0, 1, 2, 3)
STEPS = 8
#: Overflows at first, then trains, and grows into the next overflow.
DYNAMIC = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}


def settings(stage: int, *, micro: int = 2, fp16: dict[str, Any] = DYNAMIC, **more: Any) -> dict[str, Any]:
    return config(stage, micro=micro, fp16=fp16, **more)


def model(**options: Any) -> nn.Module:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"width": 20, "layers": 1, **options}
    return TinyGPT(**sizes)


def follow(engine: Any, steps: range, *, samples: int) -> list[tuple[float, float, int, float | None]]:
    """Loss, next scale, skipped steps and norm of each step."""
    found: list[tuple[float, float, int, float | None]] = []
    for step in steps:
        (loss,) = train(engine, range(step, step + 1), samples=samples)
        norm = engine.get_global_grad_norm()
        found.append((loss, engine.cur_scale, engine.skipped_steps, norm if engine.was_step_applied() else None))
    return found


def _train_stages(samples: int, accumulation: int) -> list[Any]:
    results: list[Any] = []
    micro = samples // accumulation // dsrun.init_distributed().world_size
    for stage in STAGES:
        engine = make_engine(settings(stage, micro=micro, accumulation=accumulation), model=model())
        if stage == 3:
            store_of(engine).poison = True
        results.append((follow(engine, range(STEPS), samples=samples), full_parameters(engine)))
    return results


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (3, 2)])
def test_stages_agree_bit_for_bit_over_overflows_and_learn(world_size: int, accumulation: int) -> None:
    ranks = run_ranks(world_size, _train_stages, 12, accumulation, timeout_s=300.0)
    steps, weights = ranks[0][0]
    skipped = [count for _, _, count, _ in steps]
    assert 0 < skipped[-1] < STEPS - 3, "some steps overflow, most do not"
    assert steps[-1][0] < steps[0][0], "it learns"
    for results in ranks:
        for stage, (found, of_stage) in enumerate(results):
            assert found == steps, f"stage {stage}"
            for name, value in weights.items():
                assert torch.equal(of_stage[name], value), f"stage {stage}: {name}"


def test_it_is_plain_torch_with_fp32_masters_bit_for_bit() -> None:
    """A fixed scale that is a power of two changes no bit; parameters have no vector tails."""
    engine = make_engine(
        settings(2, micro=4, fp16={"enabled": True, "loss_scale": 1024}, gradient_clipping=0),
        model=model(width=32, vocab=64, odd=0),
    )
    found = train(engine, range(5), samples=4)
    half = model(width=32, vocab=64, odd=0)
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in half.named_parameters()}
    half.half()
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.1, fused=True)
    expected: list[float] = []
    for step in range(5):
        with torch.no_grad():
            for name, param in half.named_parameters():
                param.copy_(masters[name])
                param.grad = None
        inputs, targets = batches(step, samples=4)
        loss = loss_of(half(inputs), targets)
        (loss * 1024).backward()
        for name, param in half.named_parameters():
            assert param.grad is not None
            masters[name].grad = param.grad.float() / 1024
        optimizer.step()
        expected.append(float(loss.detach()))
    assert found == expected
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, masters[name]), name


def test_clipping_is_that_of_the_gradients_without_the_loss_scale() -> None:
    runs = []
    for scale in (64, 4096):
        engine = make_engine(
            settings(1, fp16={"enabled": True, "loss_scale": scale}, gradient_clipping=0.05, optimizer="SGD"),
            model=model(),
        )
        losses = train(engine, range(3), samples=2)
        assert engine.get_global_grad_norm() > 0.05
        runs.append((losses, engine.get_global_grad_norm(), engine.cur_scale))
    # Below fp16's normal numbers the smaller scale rounds more.
    assert runs[0][0] == pytest.approx(runs[1][0], rel=2e-3)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=2e-2)
    assert [run[2] for run in runs] == [64, 4096]


def overflow_on_last_rank(stage: int) -> dict[str, Any]:
    """One good step, then one in which the last rank alone has an infinite gradient."""
    more = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}}}
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = make_engine(settings(stage, micro=1, fp16=fp16, **more), model=model())
    inputs, targets = batches(0, samples=1)
    seen: dict[str, Any] = {}
    for name, factor in (("good", 1.0), ("bad", float("inf"))):
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss * (factor if engine.global_rank == engine.world_size - 1 else 1.0))
        engine.step()
        seen[name] = (full_parameters(engine), engine.get_lr(), engine.lr_scheduler.state_dict())
        seen[f"{name} outcome"] = (engine.overflow, engine.optimizer.overflow, engine.was_step_applied())
    seen["counters"] = (engine.global_steps, engine.skipped_steps, engine.global_samples)
    seen["scale"] = (engine.cur_scale, engine.optimizer.cur_scale, engine.optimizer.loss_scale)
    seen["asked"] = (engine.fp16_enabled(), engine.dynamic_loss_scale())
    return seen


def _overflow_at_all_stages() -> list[dict[str, Any]]:
    return [overflow_on_last_rank(stage) for stage in STAGES]


def test_all_ranks_skip_where_one_overflows_and_neither_weights_nor_schedule_move() -> None:
    for results in run_ranks(2, _overflow_at_all_stages):
        for seen in results:
            assert (seen["good outcome"], seen["bad outcome"]) == ((False, False, True), (True, True, False))
            assert seen["counters"] == (2, 1, 4)
            assert seen["scale"] == (128.0, 128.0, 128.0)
            assert seen["asked"] == (True, True)
            assert seen["good"][1:] == seen["bad"][1:], "rate and schedule"
            for name, value in seen["good"][0].items():
                assert torch.equal(seen["bad"][0][name], value), name


def test_a_skipped_step_is_printed_and_recorded_with_the_parameter_and_both_scales(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    overflow_on_last_rank(2)
    said = capsys.readouterr().out
    assert "step 2: the gradient of `position` is not finite, the update was skipped; loss scale 256 -> 128" in said
    lines = [json.loads(line) for line in JobPaths(tmp_path).records.read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    assert [(line["applied"], line["loss_scale"], line.get("non_finite")) for line in steps] == [
        (True, 256.0, None),
        (False, 256.0, "position"),
    ]


def _resume(folder: str) -> tuple[Any, ...]:
    whole = make_engine(settings(1), model=model())
    expected = follow(whole, range(STEPS), samples=4)
    stopped = make_engine(settings(3), model=model())
    before = follow(stopped, range(4), samples=4)
    stopped.save_checkpoint(folder)
    resumed = make_engine(settings(2), model=model(), seed=8)
    resumed.load_checkpoint(folder)
    told = resumed.optimizer.cur_scale == resumed.cur_scale == before[-1][1]
    after = follow(resumed, range(4, STEPS), samples=4)
    same = all(torch.equal(v, full_parameters(whole)[name]) for name, v in full_parameters(resumed).items())
    return expected, before + after, told, same


def test_a_run_goes_on_with_the_scale_it_had_at_another_stage_bit_for_bit(tmp_path: Path) -> None:
    for expected, found, told, same in run_ranks(2, _resume, str(tmp_path)):
        assert len({scale for _, scale, _, _ in expected}) > 2, "the scale moves"
        assert found == expected
        assert (told, same) == (True, True)


def test_an_overflow_at_the_smallest_scale_ends_the_run_by_name() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 2}
    engine = make_engine(settings(2, fp16=fp16), model=model())
    inputs, targets = batches(0, samples=2)

    def step() -> None:
        engine.backward(loss_of(engine(inputs), targets) * float("inf"))
        engine.step()

    step()
    assert engine.cur_scale == 2
    with pytest.raises(ModelError, match=r"the gradient of `.*` is not finite at step 2, micro step 1, and the loss"):
        step()


class Regression(nn.Module):
    """Says which dtype its input had."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, x_ND: Tensor, *, extra: dict[str, Tensor]) -> Tensor:
        self.seen += [x_ND.dtype, extra["bias"].dtype, extra["index"].dtype]
        return self.layer(x_ND) + extra["bias"]


def test_auto_cast_gives_the_module_fp16_inputs_and_without_it_they_stay() -> None:
    engine = make_engine(settings(0, fp16={"enabled": True, "auto_cast": True, "loss_scale": 8}), model=Regression())
    extra = {"bias": torch.ones(2, 1), "index": torch.arange(2)}
    engine.backward(engine(torch.ones(2, 4), extra=extra).float().square().mean())
    engine.step()
    assert engine.module.seen == [torch.float16, torch.float16, torch.int64]
    engine.destroy()
    plain = make_engine(settings(0, fp16={"enabled": True, "loss_scale": 8}), model=Regression())
    with pytest.raises(ModelError, match="`x_ND` is float32"):
        plain(torch.ones(2, 4), extra=extra)


def test_a_loss_in_fp16_is_scaled_in_fp32_where_the_product_has_room() -> None:
    engine = make_engine(settings(1, fp16={"enabled": True, "loss_scale": 2**15}), model=nn.Linear(8, 1))
    loss = engine(torch.full((2, 8), 2.0**-6, dtype=torch.float16)).mean() * 0 + 3
    assert loss.dtype == torch.float16
    engine.backward(loss + engine(torch.full((2, 8), 2.0**-8, dtype=torch.float16)).mean())
    engine.step()
    assert engine.was_step_applied(), "3 * 2^15 is no fp16 number"
