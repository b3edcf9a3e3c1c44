"""Copies for torch.save hold what they show and no more, in the same structure."""

from __future__ import annotations

import io
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsrun.runtime.checkpoint.export.clones import clone_tensors_for_torch_save

Pair = namedtuple("Pair", ["left", "right"])


def saved_bytes(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


def test_a_view_is_saved_without_the_buffer_behind_it() -> None:
    buffer = torch.arange(100_000.0)
    state = {"weight": nn.Parameter(buffer.narrow(0, 10, 4).view(2, 2))}
    assert saved_bytes(state) > 400_000
    copy = clone_tensors_for_torch_save(state)
    assert saved_bytes(copy) < 10_000
    assert torch.equal(copy["weight"], state["weight"])
    assert not copy["weight"].requires_grad
    buffer.zero_()
    assert copy["weight"].sum() > 0


def test_the_structure_and_all_else_in_it_stay() -> None:
    state = OrderedDict(a=[torch.ones(1), (torch.zeros(0), "x")], b=Pair(torch.ones(2), None), c=Path("x"))
    copy = clone_tensors_for_torch_save(state, "cpu")
    assert type(copy) is OrderedDict
    assert type(copy["b"]) is Pair
    assert type(copy["a"][1]) is tuple
    assert copy["a"][1][1] == "x"
    assert copy["c"] is state["c"]
    assert copy["a"][0] is not state["a"][0]


def test_a_copy_goes_to_the_device_that_is_named() -> None:
    assert clone_tensors_for_torch_save(torch.ones(2), torch.device("meta")).device.type == "meta"
