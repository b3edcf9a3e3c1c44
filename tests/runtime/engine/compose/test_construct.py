"""What `zero.Init` reads of a config, and what it leaves to `initialize`."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dsrun import zero
from dsrun.config import axes
from dsrun.config.axes import AxisRow
from support.training import config


def is_cut(**arguments: Any) -> bool:
    """Whether `zero.Init` cuts what is built in it."""
    with zero.Init(**arguments):
        model = nn.Sequential(nn.Linear(2, 3))
    return all(map(zero.is_zero_param, model.parameters()))


@pytest.mark.parametrize(
    "settings",
    [
        {"foo": 1, "bar": 2},
        {**config(2, micro=2), "foo": 1},
        {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 2}},
    ],
)
def test_a_config_by_which_nothing_is_cut_is_not_judged(settings: dict[str, Any]) -> None:
    assert not is_cut(config_dict_or_path=settings)


def test_a_config_of_an_init_that_is_switched_off_is_not_judged() -> None:
    assert not is_cut(config_dict_or_path={"foo": 1, "bar": 2}, enabled=False)


@pytest.mark.parametrize(
    "wrong", [{"foo": 1}, {"tensor_parallel": {"autotp_size": 2}}, {"train_batch_size": 7}, {"bf16": 3}]
)
def test_what_is_wrong_with_a_config_is_left_to_initialize(wrong: dict[str, Any]) -> None:
    assert is_cut(config_dict_or_path={**config(3, micro=2), **wrong})


def test_axes_that_do_not_divide_the_ranks_are_left_to_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    row = AxisRow("second", "second axis", lambda config: 2 if config.zero_optimization.stage == 3 else 1, ())
    monkeypatch.setattr(axes, "AXES", (*axes.AXES, row))
    assert is_cut(config_dict_or_path=config(3, micro=2))
