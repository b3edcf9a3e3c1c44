"""dsrun.ops: DeepSpeed's optimizer classes where scripts import them from; see docs/guides/optimizers.md.

A face like `dsrun` itself: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsrun.deepspeed_missing import missing

if TYPE_CHECKING:
    from dsrun.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise missing(__name__, name)
    import importlib

    return importlib.import_module(f"dsrun.ops.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
