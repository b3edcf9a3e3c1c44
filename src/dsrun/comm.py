"""dsrun.comm: `torch.distributed` under the name by which scripts written for DeepSpeed import it, and how to join.

A face, loaded on first use: importing it imports no torch. Collectives take DeepSpeed's arguments beside torch's; all
other names are torch's own. What a script sends here is its own business: the engine's collectives go through groups of
their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun.runtime.engine.compose.distributed import init_distributed as init_distributed
    from dsrun.runtime.engine.deepspeed import communication

    P2POp = communication.P2POp
    TorchBackend = communication.TorchBackend
    all_gather = communication.all_gather
    all_gather_coalesced = communication.all_gather_coalesced
    all_gather_into_tensor = communication.all_gather_into_tensor
    all_gather_object = communication.all_gather_object
    all_reduce = communication.all_reduce
    all_reduce_coalesced = communication.all_reduce_coalesced
    all_to_all = communication.all_to_all
    all_to_all_single = communication.all_to_all_single
    allgather_fn = communication.allgather_fn
    barrier = communication.barrier
    batch_isend_irecv = communication.batch_isend_irecv
    broadcast = communication.broadcast
    broadcast_object_list = communication.broadcast_object_list
    gather = communication.gather
    get_all_ranks_from_group = communication.get_all_ranks_from_group
    get_global_rank = communication.get_global_rank
    get_local_rank_from_launcher = communication.get_local_rank_from_launcher
    get_world_group = communication.get_world_group
    get_world_rank_from_launcher = communication.get_world_rank_from_launcher
    get_world_size_from_launcher = communication.get_world_size_from_launcher
    has_all_gather_into_tensor = communication.has_all_gather_into_tensor
    has_all_reduce_coalesced = communication.has_all_reduce_coalesced
    has_coalescing_manager = communication.has_coalescing_manager
    has_reduce_scatter_tensor = communication.has_reduce_scatter_tensor
    inference_all_reduce = communication.inference_all_reduce
    initialize_mesh_device = communication.initialize_mesh_device
    irecv = communication.irecv
    isend = communication.isend
    log_summary = communication.log_summary
    monitored_barrier = communication.monitored_barrier
    recv = communication.recv
    reduce = communication.reduce
    reduce_scatter = communication.reduce_scatter
    reduce_scatter_fn = communication.reduce_scatter_fn
    reduce_scatter_tensor = communication.reduce_scatter_tensor
    scatter = communication.scatter
    send = communication.send

    def __getattr__(name: str) -> Any: ...

else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.engine.deepspeed.communication": (
                "P2POp",
                "TorchBackend",
                "all_gather",
                "all_gather_coalesced",
                "all_gather_into_tensor",
                "all_gather_object",
                "all_reduce",
                "all_reduce_coalesced",
                "all_to_all",
                "all_to_all_single",
                "allgather_fn",
                "barrier",
                "batch_isend_irecv",
                "broadcast",
                "broadcast_object_list",
                "gather",
                "get_all_ranks_from_group",
                "get_global_rank",
                "get_local_rank_from_launcher",
                "get_world_group",
                "get_world_rank_from_launcher",
                "get_world_size_from_launcher",
                "has_all_gather_into_tensor",
                "has_all_reduce_coalesced",
                "has_coalescing_manager",
                "has_reduce_scatter_tensor",
                "inference_all_reduce",
                "initialize_mesh_device",
                "irecv",
                "isend",
                "log_summary",
                "monitored_barrier",
                "recv",
                "reduce",
                "reduce_scatter",
                "reduce_scatter_fn",
                "reduce_scatter_tensor",
                "scatter",
                "send",
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
