"""Tensors in nested arguments: finding them, and putting others in their places. Knows no modules and no autograd."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

_Leaf = TypeVar("_Leaf")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists, mappings and dataclasses, in the order of `with_tensors`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with_tensors(value, note)
    yield from found


def with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns `value` with every tensor replaced by `change(tensor)`; see `with_leaves`."""
    return with_leaves(value, Tensor, change)


def with_leaves(value: Any, kind: type[_Leaf], change: Callable[[_Leaf], Any]) -> Any:
    """Returns `value` with everything of type `kind` replaced by what `change` makes of it.

    Tuples, lists, mappings and dataclasses are looked into, and copied; any other object is left as it is, with all
    that is inside of it.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        items: list[Any] = [with_leaves(item, kind, change) for item in value]  # pyright: ignore[reportUnknownVariableType]
        made_as: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
        return made_as(*items) if hasattr(made_as, "_fields") else tuple(items)
    if isinstance(value, list):
        return [with_leaves(item, kind, change) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Mapping):
        made: Any = copy.copy(value) if not isinstance(value, dict) or type(value) is not dict else {}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            made[key] = with_leaves(item, kind, change)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, with_leaves(getattr(value, field.name, None), kind, change))
        return made
    return value
