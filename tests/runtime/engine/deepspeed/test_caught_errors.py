"""A script that guards a call by the class that DeepSpeed 0.19.8 raises there catches dsrun's error as well.

The classes were recorded by making each mistake with DeepSpeed 0.19.8. Where it goes on and dsrun refuses, or the other
way round, there is nothing to catch; docs/decisions/0066 names those.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsrun
from dsrun.errors import CheckpointError, ConfigError, DsrunError, InputError, ModelError

SGD = {"type": "SGD", "params": {"lr": 0.1}}
Mistake = Callable[[], object]


def settings(stage: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "zero_optimization": zero, **more}


def made(config: Any, **more: Any) -> Any:
    return dsrun.initialize(model=nn.Linear(3, 3), config=config, **more)[0]


def check(mistake: Mistake, raises: type[Exception], ours: type[DsrunError]) -> None:
    with pytest.raises(raises) as caught:
        mistake()
    assert isinstance(caught.value, ours), (type(caught.value), caught.value)
    assert str(caught.value) == caught.value.problems[0].message


CONFIGS: dict[str, tuple[type[Exception], Any]] = {
    "batch triple": (AssertionError, settings(train_batch_size=7, gradient_accumulation_steps=3)),
    "no batch": (AssertionError, {"optimizer": SGD}),
    "micro batch 0": (AssertionError, settings(train_micro_batch_size_per_gpu=0)),
    "unknown optimizer": (AssertionError, settings(optimizer={"type": "Nope"})),
    "removed optimizer": (AssertionError, settings(optimizer={"type": "OneBitAdam", "params": {"lr": 1}})),
    "max_grad_norm": (ValueError, settings(optimizer={"type": "Adam", "params": {"max_grad_norm": 1}})),
    "unknown schedule": (AssertionError, settings(scheduler={"type": "Nope", "params": {}})),
    "stage 4": (ValueError, settings(4)),
    "typo": (ValueError, settings(zero_optimization={"stge": 2})),
    "fp16 and bf16": (AssertionError, settings(fp16={"enabled": True}, bf16={"enabled": True})),
    "loss scale": (ValueError, settings(fp16={"enabled": True, "loss_scale": "x"})),
    "dtype of traffic": (ValueError, settings(communication_data_type="float16")),
    "reduction": (ValueError, settings(gradient_allreduce_op="max")),
    "no nvme_path": (
        AssertionError,
        settings(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
    ),
    "device": (ValueError, settings(zero_optimization={"stage": 3, "offload_param": {"device": "gpu"}})),
    "old and new": (
        AssertionError,
        settings(zero_optimization={"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}),
    ),
    "no file": (ValueError, "/nope/x.json"),
    "neither path nor dict": (ValueError, 3),
    "none": (AssertionError, None),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_a_mistake_in_a_config_is_of_deepspeeds_class(mistake: str) -> None:
    raises, config = CONFIGS[mistake]
    check(lambda: made(config), raises, ConfigError)


def test_a_mistake_in_a_file_or_an_argument_is_of_deepspeeds_class(tmp_path: Path) -> None:
    for name, text in (("twice.json", '{"a": 1, "a": 2}'), ("broken.json", '{"a": [1, }')):
        (tmp_path / name).write_text(text)
        check(lambda path=tmp_path / name: made(str(path)), ValueError, ConfigError)
    (tmp_path / "empty.json").write_text("")
    check(lambda: made(str(tmp_path / "empty.json")), AssertionError, ConfigError)
    args = argparse.Namespace(deepspeed_config="x.json")
    check(lambda: made(settings(), args=args), AssertionError, ConfigError)
    check(lambda: dsrun.initialize(model=None, config=settings()), AssertionError, ModelError)
    check(lambda: made(settings(), optimizer=3), AssertionError, ModelError)
    check(lambda: made(settings(), model_parameters=[3]), InputError, ModelError)
    check(lambda: made(settings(), lr_scheduler=3), InputError, ModelError)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_mistake_in_the_use_of_an_engine_is_of_deepspeeds_class(stage: int, tmp_path: Path) -> None:
    engine = made(settings(stage, gradient_accumulation_steps=2))
    inputs = torch.ones(2, 3)

    def step_without_sync() -> None:
        with engine.no_sync():
            engine.backward(engine(inputs).mean())
            engine.step()

    engine.save_checkpoint(tmp_path, tag="here")
    names = ["weight", "bias"]
    for mistake, raises, ours in (
        (lambda: engine.set_train_batch_size(3), ValueError, InputError),
        (step_without_sync, AssertionError, ModelError),
        (lambda: engine.save_checkpoint(""), ValueError, InputError),
        (lambda: engine.save_checkpoint(None), ValueError, InputError),
        (lambda: engine.load_checkpoint(tmp_path, tag="nope"), AssertionError, CheckpointError),
        (lambda: engine.load_module_state_dict(dict.fromkeys(names, inputs)), RuntimeError, CheckpointError),
        (lambda: engine.load_module_state_dict({}), RuntimeError, CheckpointError),
        (lambda: engine.backward(engine(inputs)), AssertionError, ModelError),
        (lambda: engine.backward(1.0), AssertionError, ModelError),
        (lambda: engine.backward(torch.tensor(1.0)), AssertionError, ModelError),
        (lambda: engine(inputs.double()), RuntimeError, ModelError),
    ):
        check(mistake, raises, ours)
        engine.zero_grad()
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.module.load_state_dict(dict.fromkeys(names, inputs))
    with pytest.raises(AttributeError):
        _ = engine.nonsense
    engine.destroy()
    check(engine.step, RuntimeError, ModelError)
    unmanaged = made(settings(stage, managed_gradient_accumulation=False))
    check(lambda: unmanaged.set_gradient_accumulation_boundary(True), AssertionError, ModelError)
    evaluates = made({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}})
    check(lambda: evaluates.backward(evaluates(inputs).mean()), AssertionError, ModelError)
    check(evaluates.step, AssertionError, ModelError)


def test_an_error_inside_of_a_forward_stays_the_one_it_is() -> None:
    class Refuses(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise ModelError("the model says no", hint="ask another")

    engine = dsrun.initialize(model=Refuses(3, 3), config=settings())[0]
    with pytest.raises(ModelError, match=r"^the model says no"):
        engine(torch.ones(2, 3).double())
