"""Tensors among an optimizer's options keep their identity: whoever sets an option writes into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.config.sections.scheduler import SCHEDULERS
from dsrun.runtime.optim.schedules.registry import SCHEDULES
from dsrun.runtime.optim.states.option_values import kept_option, plain_option, set_option
from support.models import TinyGPT
from support.training import config, full_parameters, make_engine, train

RATE = 1e-2
#: Of schedules that have no defaults for them.
NEEDED: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 3},
    "WarmupDecayLR": {"total_num_steps": 6, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 6, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 2},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2]},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 20},
}


def double(value: float) -> Tensor:
    """A tensor that holds what a float holds, so that both can be compared bit for bit."""
    return torch.tensor(value, dtype=torch.float64)


def test_an_option_is_written_into_the_tensor_that_is_there() -> None:
    rate, beta = double(1.0), double(0.9)
    group: dict[str, Any] = {"lr": rate, "betas": (beta, 0.99), "eps": 1e-8}
    set_option(group, "lr", 0.25)
    set_option(group, "betas", (0.5, 0.75))
    set_option(group, "eps", 1e-6)
    assert group["lr"] is rate
    assert rate == 0.25
    assert group["betas"][0] is beta
    assert group["betas"] == (0.5, 0.75)
    assert group["eps"] == 1e-6
    assert plain_option(group["betas"]) == (0.5, 0.75)
    assert isinstance(plain_option(rate), float)


def test_a_copy_stays_what_it_was() -> None:
    rate = double(1.0)
    kept = kept_option((rate, 0.5))
    rate.fill_(2.0)
    assert kept == (1.0, 0.5)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # no optimizer steps here
@pytest.mark.parametrize("name", SCHEDULERS.models)
def test_every_schedule_fills_the_tensor_with_what_a_float_would_become(name: str) -> None:
    params = SCHEDULERS.models[name].model_validate(NEEDED.get(name, {})).model_dump()
    rate = double(RATE)
    plain, given = (optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr) for lr in (RATE, rate))
    schedules = [SCHEDULES[name](optimizer, **params) for optimizer in (plain, given)]
    seen: list[float] = []
    for _ in range(6):
        assert given.param_groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
        assert plain_option(given.param_groups[0]["betas"]) == pytest.approx(plain.param_groups[0]["betas"])
        seen.append(float(rate))
        for schedule in schedules:
            schedule.step()
    assert len(set(seen)) > 1, "it moves"


def settings(stage: int, offload: str | None = None) -> dict[str, Any]:
    found = config(stage, micro=4, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})
    del found["optimizer"]
    if offload is not None:
        found["zero_optimization"]["offload_optimizer"] = {"device": offload}
    return found


def engine_of(case: dict[str, Any], rate: Any) -> Any:
    torch.manual_seed(7)
    model = TinyGPT()
    return make_engine(case, model=model, optimizer=optim.AdamW(model.parameters(), lr=rate, fused=True))


def test_a_rate_in_a_tensor_trains_as_a_float_at_every_stage_and_place_and_is_saved(tmp_path: Path) -> None:
    plain = engine_of(settings(0), RATE)
    losses = train(plain, range(4), samples=4)
    expected = full_parameters(plain)
    for stage, offload in ((0, None), (2, None), (3, None), (1, "cpu"), (3, "cpu")):
        rate = double(RATE)
        engine = engine_of(settings(stage, offload), rate)
        assert train(engine, range(2), samples=4) == losses[:2], (stage, offload)
        engine.save_checkpoint(tmp_path, tag=f"{stage}{offload}")
        again = double(RATE)
        resumed = engine_of(settings(stage, offload), again)
        resumed.load_checkpoint(tmp_path, tag=f"{stage}{offload}")
        assert resumed.optimizer.param_groups[0]["lr"] is again
        assert float(again) == float(rate) == plain_rate(2)
        assert train(resumed, range(2, 4), samples=4) == losses[2:], (stage, offload)
        for name, value in full_parameters(resumed).items():
            assert torch.equal(value, expected[name]), (stage, offload, name)


def plain_rate(updates: int) -> float:
    """The rate after some updates, of the schedule in `settings`."""
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = SCHEDULES["WarmupLR"](optimizer, warmup_num_steps=3)
    for _ in range(updates):
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


def test_a_rate_that_a_script_has_set_in_its_tensor_comes_back_without_a_schedule(tmp_path: Path) -> None:
    case = {key: value for key, value in settings(1).items() if key != "scheduler"}
    engine = engine_of(case, double(RATE))
    engine.optimizer.param_groups[0]["lr"].fill_(0.125)
    engine.save_checkpoint(tmp_path)
    again = double(RATE)
    resumed = engine_of(case, again)
    resumed.load_checkpoint(tmp_path)
    assert resumed.optimizer.param_groups[0]["lr"] is again
    assert float(again) == 0.125


def test_a_schedule_of_torch_over_a_rate_in_a_tensor_is_saved_and_goes_on(tmp_path: Path) -> None:
    case = {key: value for key, value in settings(1).items() if key != "scheduler"}

    def made() -> Any:
        torch.manual_seed(7)
        model = TinyGPT()
        optimizer = optim.AdamW(model.parameters(), lr=double(RATE), fused=True)
        schedule = optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return make_engine(case, model=model, optimizer=optimizer, lr_scheduler=schedule)

    engine, resumed = made(), made()
    train(engine, range(2), samples=4)
    engine.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    assert train(engine, range(2, 4), samples=4) == train(resumed, range(2, 4), samples=4)
    rates = [each.optimizer.param_groups[0]["lr"] for each in (engine, resumed)]
    assert all(isinstance(rate, Tensor) for rate in rates)
    assert float(rates[0]) == float(rates[1])
