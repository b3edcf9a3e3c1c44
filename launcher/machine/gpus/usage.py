"""What processes do to the GPUs of this machine, by pid, as the driver tells. Never fails: without driver, nothing.

A GPU that cannot be reached, because it is lost or forbidden, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .nvml import NoDriver, ask, ask_driver, open_nvml
from .read import gpu_handle


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One process on its GPUs.

    Attributes:
        memory_bytes: memory it has there; None where the driver does not say (containers, some virtual GPUs).
        percent: how busy its busiest GPU is, with whatever runs there: the driver has no figure of one process alone
            that all kinds of GPUs give.
    """

    memory_bytes: int | None
    percent: int | None


def gpu_use_by_pid(load_nvml: Callable[[], Any] | None = None) -> dict[int, GpuUse]:
    """Asks the driver for every process that computes on a GPU.

    Args:
        load_nvml: returns the `pynvml` module; tests give a made-up one.
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


def running_on(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Returns the processes that compute on a GPU or slice, clients of MPS too, with their memory.

    Args:
        nvml: the open driver.
        handle: of the GPU or slice.

    Returns:
        pid -> bytes; None where the driver does not tell how much.
    """
    questions = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
    listed = (process for question in questions for process in ask(nvml, question, handle) or ())
    return {process.pid: process.usedGpuMemory for process in listed}


def _add(nvml: Any, handle: Any, found: dict[int, GpuUse]) -> None:
    processes = running_on(nvml, handle)
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
