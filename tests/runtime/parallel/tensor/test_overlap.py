"""Columns whose weight gradients are computed behind the gradient of their input: same values, no more products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.parallel.tensor.overlap import OverlappedInput


def seeded(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_gradients_of_a_weight_that_is_used_twice_add_up() -> None:
    x, weight, bias = seeded(2, 3, 4), seeded(5, 4, seed=2), seeded(5, seed=3)
    own, expected = [[each.clone().requires_grad_() for each in (x, weight, bias)] for _ in range(2)]
    F.linear(*expected).sin().sum().backward()
    F.linear(*expected[:2]).cos().sum().backward()
    shared = OverlappedInput(own[0], AloneCollectives(), [own[1]])
    (shared.column(0, own[2]).sin().sum() + shared.column(0, None).cos().sum()).backward()
    for mine, right in zip(own, expected, strict=True):
        torch.testing.assert_close(mine.grad, right.grad)


def flops(*, trains: bool, uses: int = 2) -> int:
    """Returns the operations of a backward of two columns, of which one trains, and the other one may."""
    x, weights = seeded(2, 4).requires_grad_(), [seeded(5, 4, seed=seed) for seed in (2, 3)]
    weights[0].requires_grad_()
    weights[1].requires_grad_(trains)
    shared = OverlappedInput(x, AloneCollectives(), weights)
    y = torch.stack([shared.column(number, None) for number in range(uses)])
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert (weights[1].grad is not None) == (trains and uses > 1)
    return counter.get_total_flops()


@pytest.mark.parametrize(("trains", "uses", "products"), [(True, 2, 4), (False, 2, 3), (True, 1, 2), (False, 1, 2)])
def test_a_gradient_of_a_frozen_or_unused_weight_is_not_computed(trains: bool, uses: int, products: int) -> None:
    assert flops(trains=trains, uses=uses) == products * 2 * 2 * 4 * 5
