"""dsrun: start and run distributed PyTorch training.

The face of the runtime, loaded on first use: importing `dsrun` imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun import zero
    from dsrun.heartbeats import heartbeat
    from dsrun.runtime.engine.arguments import add_config_arguments
    from dsrun.runtime.engine.engine import Engine
    from dsrun.runtime.engine.initialize import init_distributed, initialize

__version__ = "0.1.0"

__all__ = ["Engine", "__version__", "add_config_arguments", "heartbeat", "init_distributed", "initialize", "zero"]

_HOME = {
    "Engine": "dsrun.runtime.engine.engine",
    "add_config_arguments": "dsrun.runtime.engine.arguments",
    "heartbeat": "dsrun.heartbeats",
    "init_distributed": "dsrun.runtime.engine.initialize",
    "initialize": "dsrun.runtime.engine.initialize",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "zero":
        return importlib.import_module("dsrun.zero")
    if name not in _HOME:
        raise AttributeError(f"module 'dsrun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
