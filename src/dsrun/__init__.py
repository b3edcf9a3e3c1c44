"""dsrun: start and run distributed PyTorch training.

The face of the runtime, loaded on first use: importing `dsrun` imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun import checkpointing, comm, data, long_sequence, ops, utils, zero
    from dsrun.contract.heartbeats import heartbeat
    from dsrun.runtime.engine.compose.arguments import add_config_arguments
    from dsrun.runtime.engine.compose.distributed import init_distributed
    from dsrun.runtime.engine.engine import Engine
    from dsrun.runtime.engine.engine import Engine as DeepSpeedEngine
    from dsrun.runtime.engine.initialize import initialize
    from dsrun.runtime.zero.build.on_device import OnDevice

__version__ = version = "0.2.0"

__all__ = [
    "DeepSpeedEngine",
    "Engine",
    "OnDevice",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "data",
    "heartbeat",
    "init_distributed",
    "initialize",
    "long_sequence",
    "ops",
    "utils",
    "version",
    "zero",
]

_HOME = {
    "OnDevice": "dsrun.runtime.zero.build.on_device",
    "Engine": "dsrun.runtime.engine.engine",
    "add_config_arguments": "dsrun.runtime.engine.compose.arguments",
    "heartbeat": "dsrun.contract.heartbeats",
    "init_distributed": "dsrun.runtime.engine.compose.distributed",
    "initialize": "dsrun.runtime.engine.initialize",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("checkpointing", "comm", "data", "long_sequence", "ops", "utils", "zero"):
        return importlib.import_module(f"dsrun.{name}")
    if name == "DeepSpeedEngine":  # what scripts written for DeepSpeed ask isinstance of
        name = "Engine"
    if name not in _HOME:
        raise importlib.import_module("dsrun.deepspeed_missing").missing(__name__, name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
