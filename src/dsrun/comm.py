"""dsrun.comm: `torch.distributed` under the name by which scripts written for DeepSpeed import it, and how to join.

A face, loaded on first use: importing it imports no torch. What a script sends here is its own business: the engine's
collectives go through groups of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsrun.deepspeed_missing import missing

if TYPE_CHECKING:
    from dsrun.runtime.engine.compose.distributed import init_distributed

__all__ = ["get_local_rank", "init_distributed"]


def get_local_rank() -> int:
    """Returns this process's rank among those of its host."""
    from dsrun.contract.environment import RankInfo

    return RankInfo.from_env().local_rank


def __getattr__(name: str) -> Any:
    import importlib

    if name == "init_distributed":
        return importlib.import_module("dsrun.runtime.engine.compose.distributed").init_distributed
    distributed = importlib.import_module("torch.distributed")
    if name.startswith("_") or not hasattr(distributed, name):
        raise missing(__name__, name)
    return getattr(distributed, name)


def __dir__() -> list[str]:
    return sorted(__all__)
