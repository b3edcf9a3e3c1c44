"""What `deepspeed.comm` has beyond `torch.distributed`. For scripts: the engine's own collectives are elsewhere."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..compose.distributed import init_distributed


class TorchBackend:
    """torch.distributed as an object, which joins the job's process group where that has not happened.

    Args:
        backend: `nccl` or `gloo`.
        timeout: longest wait for the other ranks; None: the default.
        init_method: None or `env://`.
        rank: -1, or what the environment says.
        world_size: -1, or what the environment says.
        name: DeepSpeed's name for it.
    """

    def __init__(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name = name
        init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """Sums a tensor over the ranks of a group, in place; every one of them must call.

    Args:
        tensor: tensor to be summed.
        op: operation in the place of the sum.
        group: process group; None: all ranks.
    """
    return dist.all_reduce(tensor, op=op, group=group)


def get_world_group() -> Any:
    """Returns the process group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Returns the ranks of a process group, by their place in it.

    Args:
        group: process group; None: all ranks.
    """
    return dist.get_process_group_ranks(group)
