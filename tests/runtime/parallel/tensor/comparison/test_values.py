"""Tensors are found wherever a module is given or gives them, and copies share none of them."""

from __future__ import annotations

import dataclasses
import threading
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.runtime.parallel.tensor.comparison.values import copied, tensors_in


@dataclasses.dataclass(slots=True)
class Slots:
    hidden: Tensor
    absent: Tensor = dataclasses.field(init=False)


def test_tensors_are_found_in_order_by_the_way_to_them() -> None:
    a, b, c, d, e = (torch.full((1,), float(i)) for i in range(5))
    value: Any = [a, {"mask": b, 3: (c, "word")}, Slots(d), types.SimpleNamespace(inner=[e, a]), nn.Linear(1, 1), Slots]
    assert [path for path, _ in tensors_in(value)] == ["[0]", "[1]['mask']", "[1][3][0]", "[2].hidden", "[3].inner[0]"]
    assert [int(tensor) for _, tensor in tensors_in(value)] == [0, 1, 2, 3, 4]
    assert list(tensors_in(None)) == []
    assert [path for path, _ in tensors_in(a)] == [""]


def test_a_value_that_holds_itself_is_walked_through_once() -> None:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    assert [path for path, _ in tensors_in(value)] == ["[0]"]


def test_copies_have_other_tensors_in_all_places_and_the_same_modules() -> None:
    layer = nn.Linear(2, 2)
    grown = torch.ones(2, requires_grad=True) * 2  # computed, which copy.deepcopy refuses
    value = OrderedDict(x=grown, again=[grown], state=types.SimpleNamespace(layer=layer, x=grown))
    seen: list[str] = []

    def make(path: str, tensor: Tensor) -> Tensor:
        seen.append(path)
        return tensor.detach() + 1

    made = copied(value, make)
    assert seen == ["['x']"], "one tensor, one copy"
    assert type(made) is OrderedDict
    assert made["x"] is made["again"][0] is made["state"].x
    assert made["x"].tolist() == [3.0, 3.0]
    assert made["state"] is not value["state"]
    assert made["state"].layer is layer
    assert grown.tolist() == [2.0, 2.0]


def test_what_cannot_be_copied_says_so() -> None:
    with pytest.raises(TypeError, match="pickle"):
        copied([threading.Lock()], lambda path, tensor: tensor)
