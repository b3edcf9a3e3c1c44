"""A made-up `pynvml`: GPUs, MIG slices and the processes on them, as NVML answers for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


class NVMLError(Exception):
    """What the driver raises."""


#: Errors by the names that `pynvml` gives their classes after `NVMLError_`, with the driver's words for them.
ERRORS: Mapping[str, type[NVMLError]] = {
    name: type(f"NVMLError_{name}", (NVMLError,), {"__str__": lambda self, words=words: words})
    for name, words in {
        "DriverNotLoaded": "Driver Not Loaded",
        "GpuIsLost": "GPU is lost",
        "InvalidArgument": "Invalid Argument",
        "LibRmVersionMismatch": "Driver/library version mismatch",
        "LibraryNotFound": "NVML Shared Library Not Found",
        "NoPermission": "Insufficient Permissions",
        "NotFound": "Not Found",
        "NotSupported": "Not Supported",
        "Unknown": "Unknown Error",
    }.items()
}


@dataclass(frozen=True)
class Part:
    """A GPU, or with `slices` one in MIG mode; `processes` are pairs of pid and bytes (None untold)."""

    uuid: str
    processes: Sequence[tuple[int, int | None]] = ()
    used_bytes: int = 600 * MIB
    slices: Sequence[Part] = ()


def made_up_nvml(*gpus: Part) -> Callable[[], Any]:
    """Returns what loads a driver with these GPUs."""

    def slice_at(gpu: Part, index: int) -> Part:
        if index >= len(gpu.slices):
            raise ERRORS["NotFound"]
        return gpu.slices[index]

    calls: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlDeviceGetName": lambda part: "H100",
        "nvmlDeviceGetCudaComputeCapability": lambda part: (9, 0),
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
        "nvmlDeviceGetUUID": lambda part: part.uuid,
        "nvmlDeviceGetMemoryInfo": lambda part: SimpleNamespace(total=80 * GIB, free=80 * GIB - part.used_bytes),
        "nvmlDeviceGetMigMode": lambda part: (bool(part.slices), bool(part.slices)),
        "nvmlDeviceGetMaxMigDeviceCount": lambda part: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_at,
        "nvmlDeviceGetComputeRunningProcesses": lambda part: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in part.processes
        ],
    }
    return lambda: SimpleNamespace(NVMLError=NVMLError, **calls)


def box(count: int = 8, **busy: Sequence[tuple[int, int | None]]) -> list[Part]:
    """Returns GPUs `GPU-0...`; `g3=[(pid, bytes)]` puts processes on the fourth."""
    return [Part(uuid=f"GPU-{index}", processes=busy.get(f"g{index}", ())) for index in range(count)]
