"""Classes that stand before a module's own, so that something happens around its forward and it stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

from ...late_compiler import UncompiledFunction
from ...stacks import OWN_CLASS


@cache
def with_front(front: type[Any], own: type[nn.Module]) -> type[Any]:
    """Returns a class of the same name, with another one's methods before its own; see [Note: cut classes]."""
    first = getattr(own, OWN_CLASS, own)
    return type(
        own.__name__,
        (front, own),
        {"__module__": own.__module__, "__qualname__": own.__qualname__, OWN_CLASS: first},
    )


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that compilers do not look into: what it does over ranks they cannot compile."""
    hidden = UncompiledFunction(method)

    @wraps(method)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        return hidden(self, *args, **kwargs)

    return call


def own_class(module: nn.Module) -> type[Any]:
    """Returns the class that a module was of before the last front came before it."""
    return type(module).__bases__[1]


def is_plain(kind: type[Any]) -> bool:
    """Whether modules of a class compute as torch's Linear does."""
    return kind.forward is nn.Linear.forward
