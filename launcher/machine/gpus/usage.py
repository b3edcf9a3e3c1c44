"""What processes do to the GPUs of this machine, and how busy each is, as the driver tells. Without driver, nothing.

A GPU that cannot be reached, because it is lost or forbidden, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .nvml import NoDriver, ask_driver, open_nvml
from .read import gpu_handle
from .users import running_on


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One process on its GPUs.

    Attributes:
        memory_bytes: memory it has there; None where the driver does not say (containers, some virtual GPUs).
        percent: use of the process's busiest GPU in percent, by all that runs there, as not every GPU tells it by
            process; None where the driver does not say.
    """

    memory_bytes: int | None
    percent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """One GPU at one moment, whoever uses it; None where the driver does not say.

    Attributes:
        index: number of the GPU, as the driver counts.
        percent: share of time in which something ran on it, in percent.
        memory_used_bytes: bytes of its memory that are in use.
        memory_total_bytes: bytes of memory that it has.
    """

    index: int
    percent: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None


def gpus_now(load_nvml: Callable[[], Any] | None = None) -> list[GpuNow]:
    """Asks the driver how busy each GPU of this machine is; none where there is no driver.

    Args:
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.
    """
    found: list[GpuNow] = []
    try:
        with open_nvml(load_nvml) as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = gpu_handle(nvml, index)
                if handle is None:
                    continue
                rates: Any = ask_driver(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
                memory: Any = ask_driver(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
                found.append(
                    GpuNow(
                        index=index,
                        percent=None if rates is None else int(rates.gpu),
                        memory_used_bytes=None if memory is None else int(memory.total - memory.free),
                        memory_total_bytes=None if memory is None else int(memory.total),
                    )
                )
    except NoDriver:
        return []
    return found


def gpu_use_by_pid(load_nvml: Callable[[], Any] | None = None) -> dict[int, GpuUse]:
    """Asks the driver for every process that computes on a GPU.

    Args:
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.
    """
    found: dict[int, GpuUse] = {}
    try:
        with open_nvml(load_nvml) as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = gpu_handle(nvml, index)
                if handle is not None:
                    _add(nvml, handle, found)
    except NoDriver:
        return {}
    return found


def _add(nvml: Any, handle: Any, found: dict[int, GpuUse]) -> None:
    processes = running_on(nvml, handle) or {}
    rates: Any = ask_driver(nvml, nvml.nvmlDeviceGetUtilizationRates, handle) if processes else None
    percent = None if rates is None else int(rates.gpu)
    for pid, memory_bytes in processes.items():
        before = found.get(pid, GpuUse(memory_bytes=None, percent=None))
        found[pid] = GpuUse(
            memory_bytes=_together(sum, before.memory_bytes, memory_bytes),
            percent=_together(max, before.percent, percent),
        )


def _together(join: Callable[[list[int]], int], one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return join(known) if known else None
