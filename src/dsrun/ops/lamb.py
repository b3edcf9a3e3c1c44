"""dsrun.ops.lamb: LAMB, loaded on first use: importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun.runtime.optim.algorithms.deepspeed_classes import FusedLamb

__all__ = ["FusedLamb"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("dsrun.runtime.optim.algorithms.deepspeed_classes"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
