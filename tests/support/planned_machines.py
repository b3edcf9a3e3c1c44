"""Machines of the catalogue's GPUs, for tests of plans."""

from __future__ import annotations

from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine


def gpus(name: str, count: int = 8, *, per_host: int = 8, host_memory: int | None = None) -> Machine:
    gpu = find_gpu(name)
    return Machine(
        label=name,
        ranks=count,
        ranks_per_host=min(per_host, count),
        gpu=gpu,
        gpu_memory_bytes=gpu.memory_bytes,
        host_memory_bytes=host_memory,
    )
