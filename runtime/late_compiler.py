"""torch's compiler, `torch._dynamo`, imported where something compiles and not by a training that compiles nothing.

[Note: late compiler] The first optimizer of a process imports the compiler to be hidden from it: 1.4 s of a core and
155 MiB a rank, for nothing where nothing is compiled. Until the compiler is imported there is nothing to hide from. So
`postpone_compiler` has torch's optimizers run as they are, and `UncompiledFunction` does so with functions of ours. A
finder on `sys.meta_path` sees the import of the compiler, by whomever: before it, torch's functions are made what they
were; after it, each `UncompiledFunction` is hidden, as it would have been at once. So a compiler finds what it finds
without this module. What belongs to torch, and what happens where this torch is not known, stands in compat.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch

from .compat import COMPILER, compiler_is_imported, run_optimizers_uncompiled


def postpone_compiler() -> None:
    """Has torch's optimizers and recomputation do without the compiler until something imports it.

    Without effect where it is imported already, and where this torch is not known to allow it.
    """
    if compiler_is_imported():
        return
    arrival = _arrival()
    if arrival is not None and not arrival.before:
        restore = run_optimizers_uncompiled()
        if restore is not None:
            arrival.before.append(restore)


class UncompiledFunction(partial[Any]):
    """A function that compilers do not look into, as `torch.compiler.disable` makes it, without importing a compiler.

    A partial function, for compilers see the function in it, which is marked, where they would look into a `__call__`;
    and it is called without Python of its own.

    Args:
        function: function to call, which compilers do not look into.
    """

    __slots__ = ()

    def __new__(cls, function: Callable[..., Any]) -> Any:
        """Makes it."""
        arrival = None if compiler_is_imported() else _arrival()
        if arrival is None:
            return super().__new__(cls, torch.compiler.disable(function))  # pyright: ignore[reportUnknownMemberType]
        made = super().__new__(cls, function)
        arrival.uncompiled.add(made)
        if compiler_is_imported() and arrival not in sys.meta_path:
            # Another thread has imported it meanwhile, and may have looked through the set already.
            made.hide()
        return made

    def hide(self) -> None:
        """Has the compiler, which is there now, not look into the function."""
        hidden: Any = torch.compiler.disable(self.func)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        partial_again: Any = self
        partial_again.__setstate__((hidden, self.args, self.keywords, self.__dict__))


def _arrival() -> _Arrival | None:
    """Returns the finder that waits for the compiler, made if need be; None where there is no such module."""
    for finder in sys.meta_path:
        if isinstance(finder, _Arrival):
            return finder
    if PathFinder.find_spec(COMPILER, list(torch.__path__)) is None:
        return None
    arrival = _Arrival()
    sys.meta_path.insert(0, arrival)  # pyright: ignore[reportArgumentType]  # a finder by its method
    return arrival


class _Arrival:
    """Finds the compiler as it is found without it, and does what is to be done before and after its import, once.

    Attributes:
        before: functions to call before the compiler is imported, each once.
        uncompiled: functions to hide from the compiler once it is imported.
    """

    def __init__(self) -> None:
        self.before: list[Callable[[], None]] = []
        self.uncompiled: WeakSet[UncompiledFunction] = WeakSet()

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Returns the compiler's spec, whose loader tells; None for every other module."""
        if name != COMPILER:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            # Who asks and never imports changes nothing: the loader is that of this spec alone.
            loader: Any = spec.loader
            loader.exec_module = partial(self._execute, loader.exec_module)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        while self.before:
            self.before.pop()()
        try:
            execute(module)
        except BaseException:
            # An import that comes later hides what was made before this one.
            sys.meta_path.insert(0, self)  # pyright: ignore[reportArgumentType]  # a finder by its method
            raise
        for each in list(self.uncompiled):
            each.hide()
