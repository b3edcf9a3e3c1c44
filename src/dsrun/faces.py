"""Faces: modules whose names live elsewhere and are loaded on first use, so that importing a face imports no torch.

A face is a table. What type checkers see of it stands beside, as imports under `TYPE_CHECKING`; a test holds that
both have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Table = Mapping[str, Sequence[str]]


def lazy_face(
    face: str, table: Table, *, own: Sequence[str] = (), beyond: str | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a face's `__all__`, `__getattr__` and `__dir__`.

    Args:
        face: Full name of the face's module.
        table: Names by the module that they live in, `there as here` where they are called otherwise there. Names
            below the face itself are its submodules.
        own: Further names, which the face's module has itself.
        beyond: Module whose public names the face has too, without listing them.
    """
    homes: dict[str, tuple[str, str]] = {}
    for module, entries in table.items():
        for entry in entries:
            there, _, here = entry.partition(" as ")
            homes[here or there] = (module, there)
    names = sorted([*homes, *own])

    def get(name: str) -> Any:
        import importlib

        if name in homes:
            module, there = homes[name]
            if module == face:
                return importlib.import_module(f"{module}.{there}")
            return getattr(importlib.import_module(module), there)
        if beyond is not None and not name.startswith("_"):
            further = importlib.import_module(beyond)
            if hasattr(further, name):
                return getattr(further, name)
        raise importlib.import_module("dsrun.deepspeed_missing").missing(face, name)

    return names, get, lambda: list(names)
