"""Hooks that work for the module they were put on, and do nothing in copies of it. What they do, their makers know.

A deep copy of a model (an average of its weights, a frozen twin) takes its hooks along, and a pickled one cannot: the
hooks of an engine know its buffers and process groups. In a copy of either kind a hook that does nothing stands in
their place. A shallow copy shares the parameters, so there they stay.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.utils.hooks import RemovableHandle

from .late_compiler import UncompiledFunction


class OwnHook(UncompiledFunction):
    """A hook that compilers do not look into: a compiled block is compiled between its hooks.

    It is called without Python of its own: 50 ns a call in place of 110.

    Args:
        run: function that takes and returns what torch's hooks of its kind do.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves what it runs behind, see `_LeftBehind`."""
        return _LeftBehind, (RemovableHandle(OrderedDict()),)


class _LeftBehind:
    """What a copy has in place of a hook.

    Args:
        handle: made after the hook was registered. Hooks are registered by numbers that count up in each process; when
            a handle is unpickled, the count goes on behind its number, so no new hook gets the place of this one.
    """

    def __init__(self, handle: RemovableHandle) -> None:
        self._handle = handle

    def __call__(self, *args: Any) -> None:
        """Does nothing."""
