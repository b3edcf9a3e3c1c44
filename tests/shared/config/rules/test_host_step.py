"""An optimizer in host memory needs a stage that cuts it, and fp32 masters and sums."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.load import load
from dsrun.errors import ConfigError

AWAY = {"offload_optimizer": {"device": "cpu"}}


def config(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 2, "zero_optimization": {"stage": 2, **AWAY}, **more}


def narrow(form: str, **more: Any) -> dict[str, Any]:
    """A config with states in fewer bits."""
    section = {"device": "cpu", "state_format": form, **more}
    return config(zero_optimization={"stage": 2, "offload_optimizer": section})


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        (
            config(zero_optimization={"stage": 0, **AWAY}),
            "at `zero_optimization.stage` 0 every rank",
            "to 1, which cuts",
        ),
        (
            config(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
            "`bf16.bf16_master_weights_and_grads` keeps masters or sums in 16 bits",
            "halves or quarters the states",
        ),
        (
            config(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
            "`fp16.fp16_master_weights_and_grads` keeps masters or sums in 16 bits",
            "halves or quarters the states",
        ),
        (
            config(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}),
            "`data_types.grad_accum_dtype` keeps masters or sums in 16 bits",
            "leave `data_types.grad_accum_dtype` out",
        ),
        (
            config(optimizer={"type": "Muon"}),
            'optimizer type "Muon" needs whole tensors',
            "an elementwise one",
        ),
        (
            config(optimizer={"type": "Adam8bit"}),
            'optimizer type "Adam8bit" needs whole tensors',
            'take "AdamW", and set `zero_optimization.offload_optimizer.state_format` to "int8"',
        ),
        (
            narrow("int8", ratio=0.5),
            'state_format` is "int8", and `ratio` beside it is 0.5: states that stay on the GPU lie in fp32',
            "leave out one of them",
        ),
        (
            narrow("bf16", super_offload=True),
            'state_format` is "bf16", and `super_offload` beside it is true, which keeps all states twice in fp32',
            "leave out one of them",
        ),
        (
            {**narrow("bf16"), "optimizer": {"type": "Adagrad"}},
            'states of optimizer type "Adagrad" do not all decay',
            "take AdamW, Adam, Lion or SGD",
        ),
    ],
)
def test_what_the_step_in_host_memory_does_not_take_is_refused_with_a_way_out(
    settings: dict[str, Any], said: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings, world_size=1)
    (problem,) = caught.value.problems
    assert said in problem.message
    assert problem.hint is not None
    assert hint in problem.hint


def test_what_it_takes_is_taken() -> None:
    for settings in (
        config(),
        config(bf16={"enabled": True}),
        config(data_types={"grad_accum_dtype": "fp32"}),
        narrow("int8"),
    ):
        assert load(settings, world_size=1).zero_optimization.offload_optimizer.device == "cpu"


@pytest.mark.parametrize(
    ("section", "more", "reason"),
    [
        ({"device": "nvme", "nvme_path": "/a"}, {}, "on a drive a master is one stretch with its states"),
        ({"ratio": 0.5}, {}, "masters that stay on the GPU are whole"),
        ({"ratio": "auto"}, {}, "`ratio` beside it is auto: masters that stay"),
        ({"super_offload": True}, {}, "keeps whole masters twice"),
        ({}, {"bf16": {"enabled": False}}, "the upper half of an fp32 number is a bf16 one"),
        ({}, {"param": "none"}, "without parameters in host memory both halves lie there"),
    ],
)
def test_a_master_in_halves_needs_its_upper_half_beside_it(section: Any, more: dict[str, Any], reason: str) -> None:
    def settings(section: dict[str, Any], *, param: str = "cpu", **more: Any) -> dict[str, Any]:
        away = {"device": "cpu", "split_master": True, **section}
        zero = {"stage": 3, "offload_optimizer": away, "offload_param": {"device": param}}
        return {"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": zero, **more}

    with pytest.raises(ConfigError) as caught:
        load(settings(section, **more), world_size=1)
    (problem,) = caught.value.problems
    assert problem.message.startswith("<dict>: `zero_optimization.offload_optimizer.split_master` is true, and ")
    assert reason in problem.message
    assert load(settings({}), world_size=1).zero_optimization.offload_optimizer.split_master
