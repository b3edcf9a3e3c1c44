"""dsrun.comm: `torch.distributed` under the name by which scripts written for DeepSpeed import it, and how to join.

A face, loaded on first use: importing it imports no torch. What a script sends here is its own business: the engine's
collectives go through groups of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun.runtime.engine.compose.distributed import init_distributed as init_distributed
    from dsrun.runtime.engine.deepspeed.communication import TorchBackend as TorchBackend
    from dsrun.runtime.engine.deepspeed.communication import get_all_ranks_from_group as get_all_ranks_from_group
    from dsrun.runtime.engine.deepspeed.communication import get_world_group as get_world_group
    from dsrun.runtime.engine.deepspeed.communication import inference_all_reduce as inference_all_reduce

    def __getattr__(name: str) -> Any: ...

else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.engine.deepspeed.communication": (
                "TorchBackend",
                "get_all_ranks_from_group",
                "get_world_group",
                "inference_all_reduce",
            ),
            "dsrun.runtime.engine.compose.distributed": ("init_distributed",),
        },
        own=("get_local_rank",),
        beyond="torch.distributed",
    )


def get_local_rank() -> int:
    """Returns this process's rank among those of its host."""
    from dsrun.contract.environment import RankInfo

    return RankInfo.from_env().local_rank
