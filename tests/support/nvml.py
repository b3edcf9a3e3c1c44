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
        "LibRmVersionMismatch": "RM has detected an NVML/RM version mismatch.",
        "LibraryNotFound": "NVML Shared Library Not Found",
        "NoPermission": "Insufficient Permissions",
        "NotFound": "Not Found",
        "NotSupported": "Not Supported",
        "Unknown": "Unknown Error",
    }.items()
}


@dataclass(frozen=True)
class Part:
    """A GPU, or a slice of one; processes are pairs of pid and bytes (None untold).

    Attributes:
        uuid: its name.
        processes: those that compute there.
        used_bytes: memory in use.
        slices: slices of a GPU in MIG mode; None for a GPU that is not in MIG mode.
        mps: clients of MPS.
        graphics: processes that draw there.
        numa_node: NUMA node of the host that is the GPU's memory; None where there is no such node.
        fails: the error with which the driver answers for it, of `ERRORS`.
        model: its product name.
    """

    uuid: str
    processes: Sequence[tuple[int, int | None]] = ()
    used_bytes: int = 600 * MIB
    slices: Sequence[Part] | None = None
    mps: Sequence[tuple[int, int | None]] = ()
    graphics: Sequence[tuple[int, int | None]] = ()
    numa_node: int | None = None
    fails: str | None = None
    model: str = "H100"


def made_up_nvml(*gpus: Part) -> Callable[[], Any]:
    """Returns what loads a driver with these GPUs."""

    def gpu_at(index: int) -> Part:
        if (fails := gpus[index].fails) is not None:
            raise ERRORS[fails]
        return gpus[index]

    def slice_at(gpu: Part, index: int) -> Part:
        if index >= len(gpu.slices or ()):
            raise ERRORS["NotFound"]
        return (gpu.slices or ())[index]

    def numa_node(part: Part) -> int:
        if part.numa_node is None:
            raise ERRORS["NotSupported"]
        return part.numa_node

    def running(processes: Sequence[tuple[int, int | None]]) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    calls: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlDeviceGetName": lambda part: part.model,
        "nvmlDeviceGetCudaComputeCapability": lambda part: (9, 0),
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": gpu_at,
        "nvmlDeviceGetUUID": lambda part: part.uuid,
        "nvmlDeviceGetMemoryInfo": lambda part: SimpleNamespace(total=80 * GIB, free=80 * GIB - part.used_bytes),
        "nvmlDeviceGetMigMode": lambda part: [int(part.slices is not None)] * 2,
        "nvmlDeviceGetMaxMigDeviceCount": lambda part: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_at,
        "nvmlDeviceGetNumaNodeId": numa_node,
        "nvmlDeviceGetUtilizationRates": lambda part: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetComputeRunningProcesses": lambda part: running(part.processes),
        "nvmlDeviceGetMPSComputeRunningProcesses": lambda part: running(part.mps),
        "nvmlDeviceGetGraphicsRunningProcesses": lambda part: running(part.graphics),
    }
    return lambda: SimpleNamespace(NVMLError=NVMLError, **calls)


def box(count: int = 8, **busy: Sequence[tuple[int, int | None]]) -> list[Part]:
    """Returns GPUs `GPU-0...`; `g3=[(pid, bytes)]` puts processes on the fourth."""
    return [Part(uuid=f"GPU-{index}", processes=busy.get(f"g{index}", ())) for index in range(count)]
