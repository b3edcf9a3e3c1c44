"""Config names become optimizers with torch's arithmetic; what needs whole tensors is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.config.sections.optimizer_table import OPTIMIZER_ROWS, OptimizerRow
from dsrun.errors import ModelError
from dsrun.runtime.optim.registry import (
    FACTORIES,
    adopt,
    check_elementwise,
    factory_of,
    states_of_group,
    states_per_element,
)
from dsrun.runtime.optim.structure.base import StructuredOptimizer

ADAM: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-6, "adam_w_mode": True}
SGD: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": True}


def leaf() -> nn.Parameter:
    return nn.Parameter(torch.zeros(64))


def test_what_is_known_of_optimizers_and_how_they_are_made_have_the_same_names() -> None:
    assert list(FACTORIES) == [row.name for row in OPTIMIZER_ROWS]


@pytest.mark.parametrize("row", OPTIMIZER_ROWS, ids=lambda row: row.name)
def test_a_class_knows_its_tensors_unless_its_row_says_elementwise(row: OptimizerRow) -> None:
    factory = FACTORIES[row.name]
    for kind in (factory.kind, *factory.others):
        assert issubclass(kind, StructuredOptimizer) is not row.is_elementwise


@pytest.mark.parametrize("row", [row for row in OPTIMIZER_ROWS if row.params is not None], ids=lambda row: row.name)
def test_every_name_makes_a_class_of_its_row(row: OptimizerRow) -> None:
    assert row.params is not None
    factory = FACTORIES[row.name]
    for name in row.names:
        made = factory_of(name.upper(), row.params().model_dump())([leaf()])
        assert type(made) in (factory.kind, *factory.others)


@pytest.mark.parametrize(
    ("name", "decoupled", "kind"),
    [
        ("Adam", True, optim.AdamW),
        ("Adam", False, optim.Adam),
        ("adamw", False, optim.AdamW),
        ("AdamW", True, optim.AdamW),
    ],
)
def test_adam_means_adamw_unless_the_config_says_otherwise(name: str, decoupled: bool, kind: type) -> None:
    made = factory_of(name, {**ADAM, "adam_w_mode": decoupled})([leaf()])
    assert type(made) is kind
    group = made.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"], group["fused"]) == ((0.8, 0.9), 1e-6, 0.2, True)


def test_sgd_takes_its_parameters() -> None:
    made = factory_of("SGD", SGD)([{"params": [leaf()], "lr": 0.5}])
    assert (made.param_groups[0]["lr"], made.param_groups[0]["momentum"]) == (0.5, 0.9)
    assert made.param_groups[0]["nesterov"] is True


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.ASGD])
def test_states_an_element_are_those_that_a_step_makes(kind: Any) -> None:
    options: list[dict[str, Any]] = [{}]
    options += [{"momentum": 0.9}] if kind in (optim.SGD, optim.RMSprop) else []
    options += [{"centered": True, "momentum": 0.9}] if kind is optim.RMSprop else []
    options += [{"amsgrad": True}] if kind is optim.AdamW else []
    for chosen in options:
        param = leaf()
        optimizer = kind([param], **chosen)
        param.grad = torch.ones_like(param)
        optimizer.step()
        states = [v for v in optimizer.state[param].values() if torch.is_tensor(v) and v.shape == param.shape]
        assert states_per_element(optimizer) == len(states)
    assert states_per_element(None) == 0


def test_each_group_keeps_the_states_of_its_own_options() -> None:
    optimizer = optim.SGD([{"params": [leaf()], "momentum": 0.9}, {"params": [leaf()]}], lr=1.0)
    assert [states_of_group(optimizer, group) for group in optimizer.param_groups] == [1, 0]
    assert states_per_element(optimizer) == 1
    assert states_of_group(Own([leaf()]), {"momentum": 0.9}) == 0, "not known"


class Own(optim.AdamW):
    """A class nobody here has tried."""


def test_an_untested_class_is_refused_unless_allowed() -> None:
    for optimizer in (Own([leaf()]), optim.LBFGS([leaf()])):
        with pytest.raises(ModelError, match=f"{type(optimizer).__name__} is not known to be elementwise"):
            check_elementwise(optimizer, allow_untested=False)
        check_elementwise(optimizer, allow_untested=True)


def test_an_adopted_optimizer_keeps_its_object_and_options() -> None:
    optimizer = optim.SGD([{"params": [leaf()], "lr": 0.1}, {"params": [leaf()], "lr": 0.2}], lr=1.0)
    first, second = leaf(), leaf()
    adopt(optimizer, [[first], [second]])
    assert [group["params"] for group in optimizer.param_groups] == [[first], [second]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_an_optimizer_with_state_is_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError, match="this Adagrad holds state already") as caught:
        adopt(optim.Adagrad([leaf()]), [[leaf()]])
    assert caught.value.hint is not None
    assert "a function that makes it" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sgd_with_momentum_moves_weights_of_every_dtype_as_its_plain_form_does(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    plain = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    ours = factory_of("SGD", {"lr": 0.5, "momentum": 0.5})([param])
    theirs = torch.optim.SGD([plain], lr=0.5, momentum=0.5, fused=False)
    for _ in range(3):
        for tensor in (param, plain):
            tensor.grad = (torch.arange(64) / 64).to(dtype)
        ours.step()
        theirs.step()
    assert torch.allclose(param, plain, rtol=1e-2)
    assert torch.equal(param, plain) or dtype == torch.float32
