"""dsrun.data: training data that a resumed run goes on with, for scripts that have a DataLoader of their own.

A face like `dsrun` itself, loaded on first use: importing it imports no torch. `dsrun.initialize(training_data=...)`
makes a loader of these parts by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsrun.deepspeed_missing import missing

if TYPE_CHECKING:
    from dsrun.runtime.data.loader import LoaderWishes, TrainingLoader
    from dsrun.runtime.data.repeating import RepeatingLoader
    from dsrun.runtime.data.sampler import ShardedSampler
    from dsrun.runtime.data.worker_process import leave_signals_to_rank

__all__ = ["LoaderWishes", "RepeatingLoader", "ShardedSampler", "TrainingLoader", "leave_signals_to_rank"]

_HOME = {
    "LoaderWishes": "loader",
    "RepeatingLoader": "repeating",
    "ShardedSampler": "sampler",
    "TrainingLoader": "loader",
    "leave_signals_to_rank": "worker_process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise missing(__name__, name)
    import importlib

    return getattr(importlib.import_module(f"dsrun.runtime.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
