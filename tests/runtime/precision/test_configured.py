"""What the config says of number formats is what the engine gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.config.load import load
from dsrun.runtime.precision.configured import loss_scale_of, policy_of, product_dtype_of, skips_non_finite

MICRO = {"train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("sections", "compute", "skips"),
    [
        ({}, torch.float32, False),
        ({"bf16": {"enabled": True}}, torch.bfloat16, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, torch.bfloat16, False),
        ({"fp16": {"enabled": True}}, torch.float16, True),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, torch.float16, True),
        ({"fp16": {"enabled": False, "loss_scale": 8}}, torch.float32, False),
        ({"torch_autocast": {"enabled": True}}, torch.float32, False),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, torch.float32, True),
        ({"torch_autocast": {"enabled": False, "dtype": "torch.float16"}}, torch.float32, False),
    ],
)
def test_a_section_decides_dtypes_and_what_a_step_does_with_infinities(
    sections: dict[str, Any], compute: torch.dtype, skips: bool
) -> None:
    config = load({**MICRO, **sections})
    assert policy_of(config).compute == compute
    assert policy_of(config).master == torch.float32
    assert skips_non_finite(config) is skips


def test_products_are_in_the_dtype_of_autocast_where_there_is_one() -> None:
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert product_dtype_of(load({**MICRO, **autocast})) == torch.bfloat16
    assert product_dtype_of(load({**MICRO, "fp16": {"enabled": True}})) == torch.float16
    assert product_dtype_of(load(MICRO)) == torch.float32


@pytest.mark.parametrize(
    ("fp16", "value", "is_dynamic"),
    [
        ({"enabled": False, "loss_scale": 8}, 1.0, False),
        ({"enabled": True}, 65536.0, True),
        ({"enabled": True, "loss_scale": 0, "initial_scale_power": 3}, 8.0, True),
        ({"enabled": True, "loss_scale": 12.5}, 12.5, False),
        ({"enabled": True, "dynamic_loss_scale": {"init_scale": 32, "delayed_shift": 1}}, 32.0, True),
    ],
)
def test_the_loss_scale_starts_as_the_section_says(fp16: dict[str, Any], value: float, is_dynamic: bool) -> None:
    scale = loss_scale_of(load({**MICRO, "fp16": fp16}))
    assert (scale.value, scale.is_dynamic) == (value, is_dynamic)


def test_every_key_of_a_dynamic_scale_is_read() -> None:
    keys = {"hysteresis": 1, "loss_scale_window": 2, "min_loss_scale": 0.5, "consecutive_hysteresis": True}
    scale = loss_scale_of(load({**MICRO, "fp16": {"enabled": True, "initial_scale_power": 0, **keys}}))
    found: list[float] = []
    for overflow in (True, False, False, False, False):
        scale.follow(overflow=overflow, at="", what="")
        found.append(scale.value)
    assert found == [0.5, 0.5, 0.5, 1.0, 1.0]
