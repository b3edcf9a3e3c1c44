"""Mistakes in `optimizer` and `scheduler` are found by the config alone, each with key, value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Severity
from dsrun.config.load import inspect
from dsrun.config.sections.optimizer import OPTIMIZERS
from dsrun.config.sections.scheduler import SCHEDULERS

DECAY = {"total_num_steps": 10}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}


def found(config: dict[str, Any], severity: Severity = Severity.ERROR) -> list[tuple[str, str | None]]:
    findings = inspect({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, **config}).findings
    return [(finding.message, finding.hint) for finding in findings if finding.severity is severity]


def of_optimizer(name: str, **params: Any) -> list[tuple[str, str | None]]:
    return found({"optimizer": {"type": name, "params": params}})


def of_scheduler(name: str, **params: Any) -> list[tuple[str, str | None]]:
    return found({"optimizer": {"type": "Adam"}, "scheduler": {"type": name, "params": params}})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("Adam-mini", "AdamMini"), ("adamw8bits", "AdamW8bit"), ("Lamp", "Lamb"), ("Adafacter", "Adafactor")],
)
def test_an_unknown_optimizer_gets_a_suggestion(written: str, meant: str) -> None:
    ((message, hint),) = of_optimizer(written)
    assert message.startswith(f'`optimizer.type` is "{written}"; expected "Adam", "AdamW", ')
    assert hint is not None
    assert meant in hint


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Lion", {"betas": [0.9]}, "`optimizer.params.betas` is [0.9]; expected a list of two"),
        ("Lion", {"eps": 1e-8}, "`optimizer.params.eps` is not a key of `optimizer.params`"),
        ("Lamb", {"max_coeff": "big"}, '`optimizer.params.max_coeff` is "big"; expected a number of at least 0'),
        ("Muon", {"momentum": 1.0}, "`optimizer.params.momentum` is 1.0; expected a number of at least 0"),
        ("Muon", {"ns_method": "svd"}, '`optimizer.params.ns_method` is "svd"; expected "gram" or "standard"'),
        ("AdamMini", {"num_heads": 0}, "`optimizer.params.num_heads` is 0; expected a whole number of at least 1"),
        ("Adafactor", {"beta2_decay": 0.8}, "`optimizer.params.beta2_decay` is 0.8; expected a number at most 0"),
        ("Adafactor", {"eps": 1e-3}, "`optimizer.params.eps` is 0.001; expected a list of two"),
        ("Adam8bit", {"min_8bit_size": -1}, "`optimizer.params.min_8bit_size` is -1; expected a whole number"),
        ("SGD", {"nesterov": True}, "`optimizer.params.nesterov` needs `momentum` above 0"),
        ("OneBitAdam", {}, '`optimizer.type` is "OneBitAdam", which is gone'),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(name: str, params: dict[str, Any], message: str) -> None:
    assert [text for text, _ in of_optimizer(name, **params) if message in text]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("OneCycle", {"cycle_min_lr": 0.1}, "`scheduler.params.cycle_max_lr` is missing"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.01},
            "`scheduler.params.cycle_max_lr` 0.01 is below `cycle_min_lr` 0.1",
        ),
        ("MultiStepLR", {"milestones": 5}, "`scheduler.params.milestones` is 5; expected a list"),
        ("CosineAnnealingLR", {}, "`scheduler.params.T_max` is missing; expected a whole number of at least 1"),
        ("ReduceLROnPlateau", {}, '`scheduler.type` is "ReduceLROnPlateau"; this version does not build'),
        ("WarmupDecayLR", {**DECAY, "warmup_min_lr": 1.0, "warmup_max_lr": 0.5}, "is below `warmup_min_lr` 1"),
        ("WarmupLR", {"warmup_min_lr": 1.0}, "`scheduler.params.warmup_min_lr` 1 is above the optimizer's `lr` 0.001"),
        ("OneCycle", {**CYCLE, "cycle_min_mom": 0.95}, "`scheduler.params.cycle_max_mom` 0.9 is below `cycle_min_mom`"),
        ("OneCycle", {**CYCLE, "cycle_max_mom": 1}, "`scheduler.params.cycle_max_mom` is 1 with `cycle_momentum`"),
        ("LinearLR", {"start_factor": 0}, "`scheduler.params.start_factor` is 0; expected a number above 0"),
        ("ConstantLR", {"factor": 0}, "`scheduler.params.factor` is 0; expected a number above 0"),
        (
            "OneCycleLR",
            {"max_lr": 0.1, "total_steps": 10, "pct_start": 0.1},
            "`scheduler.params.pct_start` 0.1 of `total_steps` 10 is a rise of one update",
        ),
    ],
)
def test_wrong_schedules_are_told(name: str, params: dict[str, Any], message: str) -> None:
    assert [text for text, _ in of_scheduler(name, **params) if message in text]


def test_all_that_is_wrong_with_a_schedule_is_told_at_once() -> None:
    params = {"warmup_num_steps": -3, "warmup_min_lr": -1, "warmup_max_lr": "x", "warmup_type": "cubic"}
    messages = [message for message, _ in of_scheduler("WarmupDecayLR", **params)]
    wrong = {message.split("`")[1].removeprefix("scheduler.params.") for message in messages}
    assert wrong == {*params, "total_num_steps"}


def test_rates_of_a_warm_up_are_compared_without_an_optimizer_too() -> None:
    params = {"warmup_min_lr": 1.0, "warmup_max_lr": 0.5}
    ((message, _),) = found({"scheduler": {"type": "WarmupLR", "params": params}})
    assert message == "`scheduler.params.warmup_max_lr` 0.5 is below `warmup_min_lr` 1"


def test_a_cycle_says_where_an_optimizer_has_no_momentum_to_move() -> None:
    def with_adagrad(name: str, params: dict[str, Any], severity: Severity) -> list[tuple[str, str | None]]:
        return found({"optimizer": {"type": "Adagrad"}, "scheduler": {"type": name, "params": params}}, severity)

    ((message, _),) = with_adagrad("OneCycle", CYCLE, Severity.NOTE)
    assert message.endswith("moves the first of `betas`, which Adagrad has not; only the rate is cycled")
    ((message, hint),) = with_adagrad("OneCycleLR", {"max_lr": 0.1, "total_steps": 30}, Severity.ERROR)
    assert message == "`scheduler.params.cycle_momentum` is true, and Adagrad has neither `betas` nor `momentum`"
    assert hint == "set `scheduler.params.cycle_momentum` to false"


def test_the_weight_decay_that_torchs_adam_has_by_itself_in_deepspeed_is_told_of() -> None:
    for params, notes in (({}, 1), ({"weight_decay": 0.0}, 0), ({"adam_w_mode": False}, 0), ({"torch_adam": False}, 0)):
        config = {"optimizer": {"type": "Adam", "params": {"torch_adam": True, **params}}}
        told = [message for message, _ in found(config, Severity.NOTE) if "`torch_adam`" in message]
        assert len(told) == notes, params


@pytest.mark.parametrize("name", OPTIMIZERS.models)
def test_every_optimizer_is_accepted_without_parameters_in_any_case(name: str) -> None:
    for written in (name, name.lower(), name.upper()):
        assert of_optimizer(written) == []


def test_every_schedule_without_parameters_is_accepted_or_says_what_it_needs() -> None:
    for name in SCHEDULERS.models:
        assert all("is missing" in message for message, _ in of_scheduler(name)), name
