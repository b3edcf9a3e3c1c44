"""What processes do to the GPUs of this machine, by pid, as the driver tells. Never fails: without driver, nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .probe_nvml import NoDriver, ask_driver, open_nvml


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
                _add(nvml, nvml.nvmlDeviceGetHandleByIndex(index), found)
    except NoDriver:
        return {}
    return found


def _add(nvml: Any, handle: Any, found: dict[int, GpuUse]) -> None:
    processes: Sequence[Any] = ask_driver(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    rates: Any = ask_driver(nvml, nvml.nvmlDeviceGetUtilizationRates, handle) if processes else None
    percent = None if rates is None else int(rates.gpu)
    for process in processes:
        before = found.get(process.pid, GpuUse(memory_bytes=None, percent=None))
        found[process.pid] = GpuUse(
            memory_bytes=_together(sum, before.memory_bytes, process.usedGpuMemory),
            percent=_together(max, before.percent, percent),
        )


def _together(join: Callable[[list[int]], int], one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return join(known) if known else None
