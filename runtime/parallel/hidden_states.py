"""Where a block's arguments have its hidden states, by one rule for pipelines and for slices of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Returns where a block is given its hidden states: the first floating tensor, by position or by name."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return index
    for name in ("hidden_states", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            return name
    return None


def value_at(place: int | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns an argument by position or by name."""
    return args[place] if isinstance(place, int) else kwargs[place]


def with_value(
    place: int | str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with one of them replaced.

    Args:
        place: position or name.
        value: value that it is given.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, place: value}
