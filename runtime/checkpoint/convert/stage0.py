"""Optimizer states of DeepSpeed's stage 0, which is a torch optimizer's own state dict: numbers in place of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .foreign import ForeignCheckpoint, FoundTensor, held, options_of
from .parameter_order import match_groups


def add_plain_states(found: ForeignCheckpoint, optimizer: Mapping[str, Any] | None) -> None:
    """Adds the states of parameters that are found already, or says in `left` why it cannot.

    Args:
        found: checkpoint contents that already have the parameters, in the model's order; the states are added to them.
        optimizer: optimizer part of the checkpoint (a torch optimizer's state dict); None where there is none.
    """
    if not optimizer:
        return
    if "state" not in optimizer:
        found.left.append("the optimizer: stage 0 in 16 bits keeps masters that have no names; weights are 16-bit ones")
        return
    params = {one.name: one for one in found.tensors if one.role == "param"}
    states, groups = optimizer["state"], optimizer["param_groups"]
    shapes = [[_shape(states.get(number, {})) for number in group["params"]] for group in groups]
    if any(shape is None for group in shapes for shape in group):
        found.left.append("the optimizer: parameters without a state do not show which ones they are")
        return
    names = match_groups(
        {name: one.shape for name, one in params.items()}, [[s for s in group if s is not None] for group in shapes]
    )
    if names is None:
        found.left.append("the optimizer: shapes alone do not tell which state is which parameter's")
        return
    found.groups = [options_of(group) for group in groups]
    for group, of_group in zip(groups, names, strict=True):
        for number, name in zip(group["params"], of_group, strict=True):
            _add(found, name, states[number])


def _add(found: ForeignCheckpoint, name: str, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            found.tensors.append(held(name, key, value))
        elif isinstance(value, int | float | Tensor):
            number = torch.as_tensor(value, dtype=torch.float32)
            found.tensors.append(FoundTensor(name, f"scalar:{key}", (), torch.float32, lambda number=number: number))


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    return next((tuple(v.shape) for v in state.values() if isinstance(v, Tensor) and v.ndim > 0), None)
