"""Every trainable parameter gets one group, in whichever form torch optimizers take them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsrun.errors import ModelError
from dsrun.runtime.optim.groups import assign_groups, check_trainable


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_no_groups_given_is_one_group_of_all() -> None:
    m = model()
    m[1].requires_grad_(False)
    found = assign_groups(m, None)
    assert found.options == ({},)
    assert found.group_of == {id(p): 0 for p in m.parameters() if p.requires_grad}


def test_parameters_names_and_generators_are_taken() -> None:
    m = model()
    for given in (list(m.parameters()), m.parameters(), m.named_parameters(), [{"params": m.parameters()}]):
        assert assign_groups(m, given).group_of == {id(p): 0 for p in m.parameters()}


def test_groups_keep_their_options() -> None:
    m = model()
    decay = [p for p in m.parameters() if p.ndim > 1]
    plain = [(n, p) for n, p in m.named_parameters() if p.ndim == 1]
    found = assign_groups(m, [{"params": decay, "weight_decay": 0.1}, {"params": plain, "lr": 0.5, "param_names": []}])
    assert found.options == ({"weight_decay": 0.1}, {"lr": 0.5})
    assert all(found.group_of[id(p)] == (p.ndim == 1) for p in m.parameters())
    assert (
        assign_groups(m, [{"params": m[0].weight}, {"params": list(m.parameters())[1:]}]).group_of[id(m[2].bias)] == 1
    )


def test_a_tied_parameter_is_in_one_group_though_given_twice() -> None:
    m = model()
    assert assign_groups(m, [*m.parameters(), m[0].weight]).group_of[id(m[0].weight)] == 0


def test_mistakes_are_named() -> None:
    m = model()
    assert list(assign_groups(m, [m[2].weight]).group_of) == [id(m[2].weight)], "torch leaves the others alone"
    with pytest.raises(ModelError, match=r"`0\.weight` is in groups 0 and 1"):
        assign_groups(m, [{"params": m.parameters()}, {"params": [m[0].weight]}])
    with pytest.raises(ModelError, match=r"group 0 holds a tensor of shape \(7,\) that is no parameter of Sequential"):
        assign_groups(m, [nn.Parameter(torch.zeros(7)), *m.parameters()])
    for given in ([], [{"params": []}]):
        with pytest.raises(ModelError, match="all 6 trainable parameters of Sequential are in no group"):
            assign_groups(m, given)


def test_what_an_optimizer_would_have_nothing_to_do_for_is_refused() -> None:
    m = model().requires_grad_(False)
    assert not assign_groups(m, None).group_of
    with pytest.raises(ModelError, match="none of the 6 parameters of Sequential is trainable"):
        check_trainable(m)
    with pytest.raises(ModelError, match="none of the 0 parameters"):
        check_trainable(nn.ReLU())
    m[2].bias.requires_grad_(True)
    check_trainable(m)


def test_a_model_of_which_only_empty_parameters_would_be_trained_is_refused() -> None:
    m = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Embedding(4, 0))
    with pytest.raises(ModelError, match="all 1 trainable parameters of Sequential have zero elements"):
        check_trainable(m)
