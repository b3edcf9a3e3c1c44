"""Classes that stand before a module's own, so that something happens around its forward and it stays what it is."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


@cache
def with_front(front: type[Any], own: type[nn.Module]) -> type[Any]:
    """Returns a class of the same name, with another one's methods before its own; see [Note: cut classes]."""
    return type(own.__name__, (front, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def own_class(module: nn.Module) -> type[Any]:
    """Returns the class that a module was of before the last front came before it."""
    return type(module).__bases__[1]
