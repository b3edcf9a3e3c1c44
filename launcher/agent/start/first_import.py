"""Keeps torch, which a forked rank has from its spawner, out of sight until the program imports it, and then looks
which variables have changed since the spawner's import. In a fresh interpreter, tells when torch's import begins and
ends. Loads nothing, and never decides how ranks start.

[Note: first import] A program may set variables before its `import torch`. Under plain python torch reads them at that
line; here it was imported before. So that line is the moment to look: what torch can be told by a public call is told,
what it has read for good is named on stderr. Until then `"torch" in sys.modules` is False, as under plain python.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from ...plan.import_variables import HONOURED, is_read_at_import


def hide_torch(*, seen: Mapping[str, str], left: Mapping[str, str]) -> None:
    """Takes torch out of `sys.modules`; the program's first import of it, or the process's end, brings it back.

    Args:
        seen: the environment in which torch was imported.
        left: variables that the import set itself, for itself and for processes that it starts; the program's first
            import of torch sets them where the program has not.
    """
    hidden = {name: module for name, module in sys.modules.items() if name == "torch" or name.startswith("torch.")}
    torch = hidden.get("torch")
    if torch is None:
        return
    for name in hidden:
        del sys.modules[name]

    def on_import() -> None:
        for name, value in left.items():
            os.environ.setdefault(name, value)
        honour({**seen, **left}, os.environ, torch, compiler="torch._dynamo" in hidden)

    finder = _Finder(torch, hidden, on_import)
    sys.meta_path.insert(0, finder)
    if _ASKED_FIRST in hidden:
        sys.modules[_ASKED_FIRST] = _Guard(hidden[_ASKED_FIRST], torch)
    # Handlers run last in, first out: behind all of the program's, and before those of torch's own import.
    atexit.register(finder.show)


def watch_import(tell: Callable[[bool], None]) -> None:
    """Has the program's first import of torch told, where torch is a package of files.

    Args:
        tell: callback that gets True when the import of torch begins, and False when it has ended, well or not.
    """
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Watch(tell))  # pyright: ignore[reportArgumentType]  # a finder by its method


class _Watch:
    """Finds torch as it is found without it, with a loader that tells. A program may ask and never import."""

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self._tell = tell

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _TellingLoader(spec.loader.name, spec.loader.path, self._tell)
            return spec
        return None


class _TellingLoader(SourceFileLoader):
    """Loads as its parent does."""

    def __init__(self, name: str, path: str, tell: Callable[[bool], None]) -> None:
        super().__init__(name, path)
        self._tell = tell

    def exec_module(self, module: ModuleType) -> None:
        self._tell(True)
        try:
            super().exec_module(module)
        finally:
            self._tell(False)


def honour(seen: Mapping[str, str], now: Mapping[str, str], torch: Any, *, compiler: bool) -> None:
    """Tells torch what has changed since its import, and stderr what it cannot be told.

    Args:
        seen: the environment in which it was imported.
        now: the one in which the program imports it.
        torch: the package.
        compiler: whether `torch._dynamo` was imported too.
    """
    changed = sorted(name for name in seen.keys() | now.keys() if seen.get(name) != now.get(name))
    late: list[str] = []
    for name in HONOURED.intersection(changed):
        if name == "TORCH_DISTRIBUTED_DEBUG":
            torch.distributed.set_debug_level_from_env()
        elif (threads := now.get(name, "")).isdecimal() and int(threads) > 0:
            # libgomp read the variable when the spawner loaded it.
            torch.set_num_threads(int(threads))
        else:
            # Taken away, or a list: how many threads that would have been, libgomp alone knows.
            late.append(name)
    late += [name for name in changed if is_read_at_import(name, seen.get(name), now.get(name), compiler=compiler)]
    late.sort()
    if late:
        verb = "was" if len(late) == 1 else "were"
        print(
            f"dsrun: {', '.join(late)} {verb} set after the start had imported torch, which may have read it by then: "
            f"use `--env {late[0]}=VALUE`, or `--start exec`",
            file=sys.stderr,
            flush=True,
        )


#: What torch's own `__init__` imports before it loads any native code; nobody else has a use for it.
_ASKED_FIRST = "torch._utils_internal"


class _Guard(ModuleType):
    """Stands for a part of hidden torch, so that torch is not executed a second time: that ends in damaged memory.

    A finder that the program puts before ours, or in its place, loads torch from its files.
    """

    def __init__(self, part: ModuleType, torch: ModuleType) -> None:
        super().__init__(part.__name__)
        self._part, self._torch = part, torch

    def __getattr__(self, name: str) -> Any:
        # Who looks through all modules for some name is told that it is not here.
        if name.startswith("__") or name not in vars(self._part):
            raise AttributeError(name)
        if sys.modules.get("torch", self._torch) is not self._torch:
            raise RuntimeError(
                "torch is imported already, and another finder of sys.meta_path imports it from its files once more: "
                "use `--start exec`"
            )
        importlib.import_module("torch")
        return getattr(self._part, name)


class _Finder:
    """Answers the first import of torch, as finder and as loader, with the modules that are there already."""

    def __init__(self, torch: ModuleType, hidden: dict[str, ModuleType], on_import: Callable[[], None]) -> None:
        self._torch = torch
        self._spec = torch.__spec__
        self._hidden = hidden
        self._on_import = on_import

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        # Complete, as programs ask `find_spec("torch")` where torch is before they import it, or instead.
        return importlib.util.spec_from_file_location(
            name,
            self._torch.__file__,
            loader=self,  # pyright: ignore[reportArgumentType]  # a loader by its methods
            submodule_search_locations=list(self._torch.__path__),
        )

    def __getattr__(self, name: str) -> Any:
        # Sources and resources, for who asks the loader of torch's spec; but no other way to load.
        if name.startswith("_") or name == "load_module":
            raise AttributeError(name)
        return getattr(self._spec and self._spec.loader, name)

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._torch

    def exec_module(self, module: ModuleType) -> None:
        # Whoever imports a part of torch in another thread waits for this one: it imports the package first.
        module.__spec__ = self._spec
        self.show()
        self._on_import()

    def show(self) -> None:
        """Makes the modules be found as ever, once."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
            sys.modules.update(self._hidden)
