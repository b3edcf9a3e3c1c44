"""What the files of `site/deepspeed` call: names on first use, as `dsrun.faces`, and the errors for those that are not.

[Note: text of a missing name] `from m import x` drops the text of an AttributeError, and says "cannot import name". But
where `m` has a `__path__`, python then tries to import `m.x`, and passes on what that raises. So modules that are files
have an empty `__path__`, and the last finder refuses each name below `deepspeed` with its reason. Who only asks,
`hasattr` or `importlib.util.find_spec`, gets the usual answer.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import dsrun
from dsrun.contract.environment import AS_DEEPSPEED_ENV, SAID_DEEPSPEED_ENV, is_first_rank
from dsrun.deepspeed_missing import missing, missing_module
from dsrun.faces import Table, lazy_face

#: Packages whose modules the face has.
_PACKAGES = ("deepspeed", "dsrun")


def begin() -> None:
    """Does what the first import of `deepspeed` does in a process. See [Note: text of a missing name].

    Raises:
        InputError: no version can be told as the user, or who started this process, wishes.
    """
    from .version import present_version, wanted_version

    if AS_DEEPSPEED_ENV not in os.environ:
        # Nothing but PYTHONPATH has brought the face here.
        from .search_path import place, variables

        version = wanted_version(os.environ)
        os.environ.update(variables(os.environ, version))
        place(version)
    present = present_version()
    if not any(isinstance(finder, _LastFinder) for finder in sys.meta_path):
        sys.meta_path.append(_LastFinder())
    if SAID_DEEPSPEED_ENV not in os.environ and is_first_rank(os.environ):
        os.environ[SAID_DEEPSPEED_ENV] = "1"
        print(f"dsrun: deepspeed is dsrun {dsrun.__version__} (as {present})", file=sys.stderr, flush=True)


def face(
    module: str, table: Table | None = None, *, beyond: str | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__all__`, `__getattr__` and `__dir__` of a module of the face. Its submodules are its names too.

    Args:
        module: its full name.
        table: names by the module that they live in, as for `lazy_face`; `*` for all that the module lists itself.
        beyond: module whose further public names the face has too, without listing them.
    """
    listed = {
        home: [
            name for entry in entries for name in (importlib.import_module(home).__all__ if entry == "*" else [entry])
        ]
        for home, entries in (table or {}).items()
    }
    names, get, listing = lazy_face(module, listed, beyond=beyond)
    sys.modules[module].__class__ = _Module

    def get_name(name: str) -> Any:
        if name == "__path__":
            return []
        if name not in names and not name.startswith("_") and _has_submodule(module, name):
            return importlib.import_module(f"{module}.{name}")
        found = get(name)
        if isinstance(found, ModuleType) and found.__name__.partition(".")[0] not in _PACKAGES:
            raise missing(module, name)  # a module of torch's that `beyond` happens to have under this name
        return found

    return names, get_name, listing


def _has_submodule(module: str, name: str) -> bool:
    path: Sequence[str] = getattr(sys.modules[module], "__path__", [])
    return bool(path) and PathFinder.find_spec(f"{module}.{name}", path) is not None


class _Module(ModuleType):
    """A module of the face: a name that it lists stays, where a submodule of that name is imported, as in DeepSpeed."""

    __all__: list[str]

    def __setattr__(self, name: str, value: object) -> None:
        is_submodule = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if not (is_submodule and name in self.__all__):
            super().__setattr__(name, value)


class _LastFinder:
    """Refuses what no other finder has found below `deepspeed`, with the reason."""

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: object = None) -> None:
        if not name.startswith("deepspeed.") or _only_asks():
            return
        parent, _, leaf = name.rpartition(".")
        if hasattr(sys.modules.get(parent), leaf):
            raise ModuleNotFoundError(f"{name} is an attribute and no module: write `from {parent} import {leaf}`")
        raise missing_module(name)


def _only_asks() -> bool:
    """Whether the import system was called by `importlib.util.find_spec`, and not for an import."""
    frame = sys._getframe(3)  # pyright: ignore[reportPrivateUsage]  # public, but for its name
    return frame.f_globals.get("__name__") == "importlib.util"
