"""Tensors in what a module is given and gives: in lists, tuples, mappings, and attributes of objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a value, each once, with the way to it as Python writes it: `[0]`, `['mask']`, `.hidden`.

    Args:
        value: anything; modules are not looked into.
    """
    yield from ((path, one) for path, one in _walk(value) if isinstance(one, Tensor))


def copied(value: Any, make: Callable[[str, Tensor], Tensor], memo: dict[int, Any] | None = None) -> Any:
    """Returns a deep copy, in which other tensors stand for those of the value; modules are shared.

    Args:
        value: anything that can be copied.
        make: function of the way to a tensor, see `tensors_in`, and the tensor; it returns the copy's.
        memo: copies made before, by the id of what they are of; filled. None for none.

    Raises:
        TypeError: something in it cannot be copied; errors of its own copying go through as they are.
    """
    memo = {} if memo is None else memo
    for path, one in _walk(value):
        if id(one) not in memo:
            memo[id(one)] = make(path, one) if isinstance(one, Tensor) else one
    return copy.deepcopy(value, memo)


def _walk(value: Any) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yields tensors and modules, each once, in order."""
    known: set[int] = set()
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        path, one = left.pop()
        if id(one) in known or isinstance(one, type):
            continue
        known.add(id(one))
        if isinstance(one, Tensor | nn.Module):
            yield path, one
        else:
            left += reversed([(f"{path}{step}", part) for step, part in _parts_of(one)])


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{number}]", part) for number, part in enumerate(cast("list[Any]", value))]
    if isinstance(value, MethodType):
        return [(".__self__", value.__self__)]
    if isinstance(value, partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    slots: tuple[str, ...] = getattr(type(value), "__slots__", ())
    names = [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]
    return [(f".{name}", getattr(value, name)) for name in names]
