"""Parameters marked as experts are told from others, and refused where an optimizer's groups are made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsrun.errors import ModelError
from dsrun.runtime.deepspeed import experts


def marked() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2))
    param.allreduce = False  # type: ignore[attr-defined]
    return param


def test_a_mark_and_nothing_else_makes_an_expert() -> None:
    expert, shared = marked(), nn.Parameter(torch.zeros(1))
    assert experts.is_moe_param(expert)
    assert not experts.is_moe_param(shared)
    first, second = experts.split_params_into_shared_and_expert_params([expert, shared])
    assert first[0] is shared
    assert second[0] is expert
    assert experts.has_moe_layers(nn.Linear(1, 1)) == (False, 0)
    assert [experts.is_moe_param_group(group) for group in ({"moe": True}, {"params": []})] == [True, False]


def test_groups_without_experts_come_back_as_they_are() -> None:
    params = list(nn.Linear(2, 2).parameters())
    one = {"params": iter(params), "name": "all", "lr": 0.1}
    (group,) = experts.split_params_into_different_moe_groups_for_optimizer(one)
    assert group is one
    assert group == {"params": params, "name": "all", "lr": 0.1}
    two = ({"params": params[:1]}, {"params": params[1:]})
    assert experts.split_params_into_different_moe_groups_for_optimizer(two) == list(two)


def test_experts_and_what_is_no_group_are_refused_by_their_place() -> None:
    with pytest.raises(ModelError, match="group 1 has parameters with `allreduce = False`") as refused:
        experts.split_params_into_different_moe_groups_for_optimizer([{"params": []}, {"params": [marked()]}])
    assert "no expert parallelism" in str(refused.value.hint)
    with pytest.raises(ValueError, match="entry 0 is a Parameter; expected a dict"):
        experts.split_params_into_different_moe_groups_for_optimizer([marked()])  # type: ignore[list-item]
