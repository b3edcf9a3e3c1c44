"""dsrun.long_sequence: what lets a long sequence fit, see docs/guides/long-sequences.md.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun.runtime.long_sequence.attention import attention
    from dsrun.runtime.long_sequence.cross_entropy import linear_cross_entropy
    from dsrun.runtime.long_sequence.tiling import TiledMLP, tiled

__all__ = ["TiledMLP", "attention", "linear_cross_entropy", "tiled"]

_PACKAGE = "dsrun.runtime.long_sequence"
_HOME = {
    "TiledMLP": f"{_PACKAGE}.tiling",
    "attention": f"{_PACKAGE}.attention",
    "linear_cross_entropy": f"{_PACKAGE}.cross_entropy",
    "tiled": f"{_PACKAGE}.tiling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dsrun.long_sequence' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
