"""Which GPU is a rank's, and that no two ranks have the same one.

[Note: visible GPUs] A process sees the GPUs that CUDA_VISIBLE_DEVICES names, counted from 0. Where all ranks of a host
see the same ones, the local rank is the index of a rank's. Where a scheduler shows each rank its own alone, as
`srun --gpus-per-task=1` and Kubernetes do, each has index 0; so has a MIG slice, for CUDA shows a process one of them.
Nothing that a rank sees tells these from four ranks that were started on one GPU. So the ranks tell each other: each
leaves the name of its GPU in the job's store, before NCCL is asked for anything.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError

from ...compat import PrefixStore, Store
from .backends import Backend


def choose_device(backend: Backend, info: RankInfo) -> torch.device:
    """Returns the device of this rank and makes it current: under NCCL the GPU of `gpu_index`, else the CPU.

    Raises:
        InputError: there are fewer GPUs than ranks on this host.
    """
    if backend == "gloo":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = gpu_index(info.local_rank, count)
    if index >= count:
        raise InputError(
            f"local rank {info.local_rank} has no GPU: {info.local_world_size} ranks and {count} visible GPUs here",
            hint=f"start at most {count} ranks here (`-n {count}`), or make more GPUs visible",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def gpu_index(local_rank: int, count: int) -> int:
    """Returns which of the GPUs that torch sees is a rank's, see [Note: visible GPUs]; it may be one too many.

    Args:
        local_rank: rank within the host.
        count: GPUs that torch sees.
    """
    return 0 if count == 1 else local_rank


def gpu_name(device: torch.device) -> str:
    """Returns what no other GPU is called: the MIG slice that this process was given, else the GPU's UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if visible.startswith("MIG-"):
        return visible.partition(",")[0]
    properties: Any = torch.cuda.get_device_properties(device)
    return f"GPU-{properties.uuid}"


def claim_gpu(store: Store, gpu: str, info: RankInfo, *, host: str | None = None) -> None:
    """Says that a GPU is this rank's; of two ranks with one GPU, the later one raises.

    One message to the store, whatever the number of ranks.

    Args:
        store: the job's.
        gpu: name of the GPU, as `gpu_name` returns it.
        info: this rank's place in the job.
        host: name of the host that has the GPU; None: this host. NCCL too compares GPUs of one host only.

    Raises:
        InputError: another rank has said so before.
    """
    here = socket.gethostname() if host is None else host
    key = f"{here} {gpu}"
    first = PrefixStore("dsrun gpus", store).compare_set(key, "", str(info.rank)).decode()
    if first != str(info.rank):
        raise InputError(
            f"rank {info.rank} and rank {first} have the same GPU on {here}, {gpu}: "
            f"{info.local_world_size} ranks here, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}",
            hint="start at most one rank a GPU (`-n`), or give each rank a GPU of its own, as "
            "`srun --gpus-per-task=1` does",
        )
