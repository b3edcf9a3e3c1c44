"""Tensors in nested values."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsrun.runtime.activation.keep.nested import tensors_in, with_tensors


class Pair(NamedTuple):
    left: Tensor
    right: object


@dataclass(frozen=True)
class Carried:
    hidden: Tensor
    name: str


def test_every_tensor_is_replaced_and_everything_else_is_kept() -> None:
    one = torch.ones(1)
    opaque = object()
    value = (one, [one, 3], {"a": Pair(one, opaque), "b": OrderedDict(x=one)}, Carried(one, "n"), None)
    found = with_tensors(value, lambda t: t + 1)
    assert [float(t) for t in tensors_in(found)] == [2.0] * 5
    assert found[1][1] == 3
    assert isinstance(found[2]["a"], Pair)
    assert found[2]["a"].right is opaque
    assert isinstance(found[2]["b"], OrderedDict)
    assert (found[3].name, found[4]) == ("n", None)


def test_what_is_given_is_not_changed() -> None:
    one = torch.ones(1)
    inner = {"a": one}
    with_tensors((inner,), lambda t: t * 5)
    assert inner["a"] is one
