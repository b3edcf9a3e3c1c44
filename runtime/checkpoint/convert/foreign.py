"""What another tool's checkpoint comes to: tensors by name and role, each made when it is written, and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A whole tensor of another checkpoint.

    Attributes:
        name: name of the parameter or buffer that the tensor belongs to.
        role: role of the tensor as the checkpoint index has it: `param`, `buffer`, `exp_avg`, `scalar:step`, ...
        shape: whole.
        dtype: dtype of the values.
        make: function that returns the values as a CPU tensor of this shape.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


@dataclass(slots=True)
class ForeignCheckpoint:
    """Another tool's checkpoint.

    Attributes:
        tensors: everything that is taken over.
        aliases: names of tied parameters, mapped to the names they are stored under.
        counters: counters such as `global_steps`, with the names that the checkpoint index uses.
        groups: hyperparameters of the optimizer's groups.
        optimizer: name of its class; None where the files do not say.
        scheduler: type and state; None where there is none. Its type is None where the files do not say it.
        loss_scale: state of a dynamic one; None where there is none.
        client_state: other values that the script saved, as `format/client_state.py` takes them apart.
        frozen: whether it has parameters that are not trained.
        config: the training config.
        origin: tool and folder that the checkpoint came from, with the tool's version for DeepSpeed.
        left: descriptions of everything that was not taken over, shown to the user.
    """

    tensors: list[FoundTensor]
    origin: str
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    optimizer: str | None = None
    scheduler: dict[str, Any] | None = None
    loss_scale: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict[str, Any])
    frozen: bool = True
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    left: list[str] = field(default_factory=list[str])


def held(name: str, role: str, tensor: Tensor) -> FoundTensor:
    """Returns a tensor that is there already, or mapped from a file."""
    return FoundTensor(name, role, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's hyperparameters: no parameters, and nothing that says how a step is computed."""
    kept = {k: v for k, v in group.items() if k not in _NO_OPTIONS}
    return {k: v for k, v in kept.items() if isinstance(v, bool | int | float | str | tuple | list | None)}


_NO_OPTIONS = frozenset({"params", "name", "step", "foreach", "fused", "capturable", "differentiable", "moe"})


def json_or_none(value: Any) -> tuple[bool, Any]:
    """Returns whether a value can be JSON, and the value as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return True, value
    if isinstance(value, list | tuple):
        items = [json_or_none(item) for item in value]
        return all(ok for ok, _ in items), [item for _, item in items]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        members = {key: json_or_none(item) for key, item in value.items()}
        return all(ok for ok, _ in members.values()), {key: item for key, (_, item) in members.items()}
    return False, None
