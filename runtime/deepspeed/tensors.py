"""Small functions by DeepSpeed's names, for scripts: tensors in nested containers, seeds, text of calls."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dsrun.errors import ModelError

_Any = TypeVar("_Any")

#: A context in which nothing is different.
noop_context = nullcontext


def noop_decorator(func: _Any) -> _Any:
    """Returns what it is given."""
    return func


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Moves what a container holds to a device, in lists, tuples and dicts of any depth.

    Args:
        item: tensor, module or other object with a method `to`, or container of such.
        device: device.
        criterion_func: function that says which are moved in place, by their `data`; the others are replaced by what
            `to` returns. None: all are.

    Returns:
        the item that was moved in place, what `to` returned, or a new container.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    return _map(item, lambda leaf: leaf.to(device), lambda inner: move_to_device(inner, device, criterion_func))


def copy_to_device(item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool]) -> Any:
    """Returns an item, or a new container of such, with those on a device that `criterion_func` says.

    What is given stays as it is. Nothing that is on the device already is copied, as in DeepSpeed.

    Args:
        item: any object, or container of such.
        device: device.
        criterion_func: function that says which are put there, by their method `to`; the others stay as they are.
    """
    if criterion_func(item):
        return item.to(device)
    return _map(item, lambda leaf: leaf, lambda inner: copy_to_device(inner, device, criterion_func))


def get_tensor_bytes(item: Any) -> int:
    """Returns the bytes of the tensors that a container holds, in lists, tuples and dicts of any depth."""
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    return sum(map(get_tensor_bytes, _inner(item)))


def set_random_seed(seed: int) -> None:
    """Seeds the generators of `random`, of numpy where it is installed, and of torch on all devices.

    Args:
        seed: seed, also one that is larger than a generator takes.
    """
    random.seed(seed)
    if find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of a file if it is not there; one without a folder is in the present one."""
    os.makedirs(os.path.dirname(filename) or os.curdir, exist_ok=True)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """Returns a call as text: `base(1, key=2)`."""
    words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


def get_only_unique_item(items: Iterable[_Any]) -> _Any:
    """Returns what all items are equal to.

    Raises:
        ModelError: they are not all equal, or there is none.
    """
    found = list(items)
    different = set(found)
    if len(different) != 1:
        raise ModelError(f"get_only_unique_item: {found} are {len(different)} different items; expected one")
    return different.pop()


def _inner(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return cast("dict[Any, Any]", item).values()
    return cast("list[Any]", item) if isinstance(item, list | tuple) else ()


def _map(item: Any, leaf: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Any:
    """Returns a new container of what `inner` makes of the things in it, or what `leaf` makes of another object."""
    if isinstance(item, dict):
        return {key: inner(value) for key, value in cast("dict[Any, Any]", item).items()}
    if isinstance(item, list):
        return [inner(value) for value in cast("list[Any]", item)]
    if isinstance(item, tuple):
        return tuple(inner(value) for value in cast("tuple[Any, ...]", item))
    return leaf(item)
