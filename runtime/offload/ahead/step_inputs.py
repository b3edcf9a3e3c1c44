"""What a step was computed from, so that it shows whether that has changed since: options, scalars, states, masters.

Values and comparisons; who steps ahead and what becomes of it stands in `speculation.py`.

[Note: versions] Tensors are as large as a model, so it is not their values that are compared but how often they were
written to, which torch counts. Steps in host memory write past that count; they are over when anything is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...optim.sharded import ShardOptimizer
from ...optim.structure.runs import Run
from ..states.host_range import HostRange


@dataclass(frozen=True, slots=True, eq=False)
class RunBefore:
    """A run's masters, states and scalars as a step found them, see [Note: versions].

    Attributes:
        versions: version counts of the range's masters, and of the leaf over the run.
        states: state tensors with their version counts, by name.
        scalars: all other state, as copies.
    """

    versions: tuple[int, int]
    states: Mapping[str, tuple[Tensor, int]]
    scalars: Mapping[str, Any]

    def is_now(self, item: HostRange, run: Run, optimizer: ShardOptimizer) -> bool:
        """Whether nobody has set any of it since."""
        states, scalars = optimizer.states.split(run)
        return (
            self.versions == _versions(item, run)
            and states.keys() == self.states.keys()
            and all(self.states[name][0] is now for name, now in states.items())
            and all(self.states[name][1] == now._version for name, now in states.items())
            and same(self.scalars, scalars)
        )


def run_before(
    item: HostRange, run: Run, states: Mapping[str, Tensor], scalars: Mapping[str, Any], optimizer: ShardOptimizer
) -> RunBefore:
    """Returns what a step of a run is about to be computed from.

    Raises:
        ModelError: the optimizer keeps what cannot be copied.
    """
    return RunBefore(
        versions=_versions(item, run),
        states={name: (state, state._version) for name, state in states.items()},
        scalars=kept_scalars(scalars, optimizer),
    )


def kept_scalars(scalars: Mapping[str, Any], optimizer: ShardOptimizer) -> dict[str, Any]:
    """Returns copies of a run's state that is not one value an element.

    Raises:
        ModelError: naming what cannot be copied.
    """
    copies: dict[str, Any] = {}
    for name, value in scalars.items():
        try:
            copies[name] = copy.deepcopy(value)
        except Exception as error:
            raise ModelError(
                f"optimizer: {type(optimizer.torch_optimizer).__name__} keeps `{name}`, a {type(value).__name__}, in "
                f"its state, which cannot be copied ({type(error).__name__}: {error}), so no step of it may be taken "
                "ahead",
                hint="leave `offload_optimizer.super_offload` out",
            ) from error
    return copies


def kept_options(options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each group's options, with copies of the tensors, lists and dicts in them."""

    def kept(value: Any) -> Any:
        return copy.deepcopy(value) if isinstance(value, Tensor | list | dict) else value

    return [{key: kept(value) for key, value in group.items()} for group in options]


def taken_over(now: Any, value: Any) -> Any:
    """Returns a scalar's new value: in the tensor that somebody may hold, where there is one."""
    if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape and now.dtype == value.dtype:
        return now.copy_(value)
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two values, or all in two dicts, lists or tuples of them, are equal; tensors to the last bit of each."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one is other or bool(one == other)


def _versions(item: HostRange, run: Run) -> tuple[int, int]:
    return item.master_N._version, run.param._version
