"""Attributes by a path with dots, by DeepSpeed's names in `compression.helper`. Imports no torch."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Returns what a path names.

    Args:
        model: Object that the path starts at.
        module_name: Path, like `encoder.0.linear`.

    Raises:
        AttributeError: Some part is not there.
    """
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets what a path names.

    Args:
        model: Object that the path starts at.
        module_name: Path, like `encoder.0.linear`; all but its last part is there.
        module: Value.

    Raises:
        AttributeError: Some part before the last is not there.
    """
    parent, dot, name = module_name.rpartition(".")
    setattr(attrgetter(parent)(model) if dot else model, name, module)
