"""Floating-point tensors are cast wherever they lie in the arguments, and nothing else changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsrun.runtime.precision.casting import cast_floating


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Own:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)


def test_floating_point_tensors_are_cast_inside_of_lists_tuples_and_dicts() -> None:
    own = Own()
    tokens = torch.tensor([1, 2])
    value: Any = {"x": [torch.ones(2), (torch.ones(1, dtype=torch.float64), "text", None)], "n": tokens, "own": own}
    found = cast_floating(value, torch.float16)
    assert found["x"][0].dtype == found["x"][1][0].dtype == torch.float16
    assert found["x"][1][1:] == ("text", None)
    assert found["n"] is tokens
    assert found["own"] is own
    assert own.tensor.dtype == torch.float32
    assert value["x"][0].dtype == torch.float32, "the caller's own is left as it is"


def test_named_tuples_keep_their_names() -> None:
    found = cast_floating(Pair(torch.ones(2), torch.tensor([True])), torch.float16)
    assert isinstance(found, Pair)
    assert (found.left.dtype, found.right.dtype) == (torch.float16, torch.bool)


def test_a_gradient_reaches_the_input_that_was_cast() -> None:
    x = torch.ones(3, requires_grad=True)
    cast_floating((x,), torch.float16)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
