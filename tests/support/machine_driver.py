"""A recorded machine's driver: a `pynvml` that answers for its GPUs. What a file leaves out is not supported."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from support.nvml import ERRORS, MIB, NVMLError

#: One GPU or slice, as machines.py prepares it; the same object every time, as NVML's handles are.
Handle = Mapping[str, Any]


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


def full_address(address: str) -> str:
    """Returns a PCI address with its domain, which is 0000 where a file leaves it out."""
    return address if address.count(":") == 2 else f"0000:{address}"


def driver_of(
    gpus: Sequence[Handle],
    driver: Mapping[str, Any],
    *,
    lost: Collection[int] = (),
    forbidden: Collection[int] = (),
) -> Callable[[], Any]:
    """Returns what loads a driver that lists these GPUs.

    Args:
        gpus: those it lists, in PCI order.
        driver: `version`, `cuda`, and `fails`, the error with which it does not start.
        lost: indices of GPUs that it counts and cannot reach.
        forbidden: indices of GPUs that it counts and does not show.
    """

    def start() -> None:
        if "fails" in driver:
            raise ERRORS[driver["fails"]]

    def at(index: int) -> Handle:
        if not 0 <= index < len(gpus):
            raise ERRORS["InvalidArgument"]
        if index in lost or gpus[index].get("lost"):
            raise ERRORS["GpuIsLost"]
        if index in forbidden or gpus[index].get("forbidden"):
            raise ERRORS["NoPermission"]
        return gpus[index]

    def by_uuid(uuid: str | bytes) -> Handle:
        name = uuid.decode() if isinstance(uuid, bytes) else uuid
        for index, gpu in enumerate(gpus):
            for handle in (gpu, *slices(gpu)):
                if handle["uuid"] == name:
                    at(index)
                    return handle
        raise ERRORS["NotFound"]

    def slices(gpu: Handle) -> Sequence[Handle]:
        return gpu["mig"]["slices"] if gpu.get("mig") else ()

    def slice_at(gpu: Handle, number: int) -> Handle:
        if number >= len(slices(gpu)):
            raise ERRORS["NotFound"]
        return slices(gpu)[number]

    def mig_mode(gpu: Handle) -> list[int]:
        return [int(told(gpu, "mig") is not False)] * 2

    answers: dict[str, Any] = {
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: driver["version"],
        "nvmlSystemGetCudaDriverVersion_v2": lambda: driver["cuda"],
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": at,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetIndex": lambda gpu: list(gpus).index(gpu),
        "nvmlDeviceGetMinorNumber": _value("minor"),
        "nvmlDeviceGetNumaNodeId": _value("numa"),
        "nvmlDeviceGetUUID": _value("uuid"),
        "nvmlDeviceGetName": _value("name"),
        "nvmlDeviceGetMemoryInfo": _memory,
        "nvmlDeviceGetCudaComputeCapability": _value("sm"),
        "nvmlDeviceGetPciInfo": lambda gpu: bus(told(gpu, "at")),
        "nvmlDeviceGetEccMode": lambda gpu: [int(told(gpu, "ecc"))] * 2,
        "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: gpu.get("ecc_uncorrected", 0),
        "nvmlDeviceGetRemappedRows": _value("remapped"),
        "nvmlDeviceGetRetiredPages": _value("retired"),
        "nvmlDeviceGetPowerUsage": _value("power_w", 0, 1000),
        "nvmlDeviceGetEnforcedPowerLimit": _value("power_w", 1, 1000),
        "nvmlDeviceGetPowerManagementDefaultLimit": _value("power_w", 2, 1000),
        "nvmlDeviceGetClockInfo": lambda gpu, kind: told(gpu, "clocks_mhz")[0 if kind == 1 else 2],
        "nvmlDeviceGetMaxClockInfo": _value("clocks_mhz", 1),
        "nvmlDeviceGetCurrentClocksThrottleReasons": _value("throttle"),
        "nvmlDeviceGetTemperature": _value("temperature"),
        "nvmlDeviceGetPersistenceMode": _value("persistence"),
        "nvmlDeviceGetComputeMode": lambda gpu: gpu.get("compute_mode", 0),
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetBAR1MemoryInfo": lambda gpu: SimpleNamespace(bar1Total=told(gpu, "bar1_mib") * MIB),
        "nvmlDeviceGetDisplayActive": lambda gpu: int(gpu.get("display", False)),
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7 if told(gpu, "mig") else 0,
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_at,
        "nvmlDeviceIsMigDeviceHandle": lambda gpu: int("part" in gpu),
        "nvmlDeviceGetFieldValues": _fields,
        "nvmlDeviceGetP2PStatus": lambda gpu, other, kind: gpu.get("p2p", 0),
        "nvmlDeviceGetComputeRunningProcesses": _running("processes"),
        "nvmlDeviceGetGraphicsRunningProcesses": _running("graphics"),
        "nvmlDeviceGetMPSComputeRunningProcesses": _running("mps"),
        "nvmlDeviceGetCurrPcieLinkGeneration": _value("link", 0),
        "nvmlDeviceGetCurrPcieLinkWidth": _value("link", 1),
        "nvmlDeviceGetMaxPcieLinkGeneration": _value("link", 2),
        "nvmlDeviceGetMaxPcieLinkWidth": _value("link", 3),
        "nvmlDeviceGetNvLinkState": _link_state,
        "nvmlDeviceGetNvLinkVersion": lambda gpu, link: told(gpu, "nvlink")["version"],
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: 2 if _links(gpu)[link] is None else 0,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: bus(_links(gpu)[link] or ""),
        "c_nvmlGpuFabricInfo_t": _FabricInfo,
        "nvmlDeviceGetGpuFabricInfo": _fabric,
    }
    classes = {f"NVMLError_{name}": error for name, error in ERRORS.items()}
    return lambda: SimpleNamespace(NVMLError=NVMLError, **classes, **answers)


def told(gpu: Handle, key: str) -> Any:
    """Returns what the file says of a GPU; what it leaves out the driver does not support."""
    if key not in gpu:
        raise ERRORS["NotSupported"]
    return gpu[key]


def bus(at: str) -> SimpleNamespace:
    """Returns the answer to where a GPU is: NVML writes eight digits of domain and upper case."""
    domain, _, rest = full_address(at.split()[-1] if at else "0000:00:00.0").partition(":")
    return SimpleNamespace(busId=f"{int(domain, 16):08X}:{rest.upper()}", domain=int(domain, 16))


def _value(key: str, index: int | None = None, scale: int = 1) -> Callable[..., Any]:
    def answer(gpu: Handle, *_: Any) -> Any:
        found = told(gpu, key) if index is None else told(gpu, key)[index]
        return found * scale

    return answer


def _running(key: str) -> Callable[[Handle], list[SimpleNamespace]]:
    return lambda gpu: [
        SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB) for pid, mib in gpu.get(key, ())
    ]


def _memory(gpu: Handle) -> SimpleNamespace:
    if not gpu.get("memory_told", True):
        raise ERRORS["NotSupported"]
    return SimpleNamespace(total=told(gpu, "memory_mib") * MIB, free=told(gpu, "free_mib") * MIB)


def _links(gpu: Handle) -> list[str | None]:
    """Where each link ends: the address of a GPU, or None for a switch."""
    nvlink = told(gpu, "nvlink")
    peers = [address for address, count in nvlink.get("peers", {}).items() for _ in range(count)]
    return [*peers, *[None] * nvlink.get("switches", 0)]


def _link_state(gpu: Handle, link: int) -> int:
    up, down = len(_links(gpu)), gpu["nvlink"].get("down", 0)
    if link >= up + down:
        raise ERRORS["InvalidArgument"]
    return int(link < up)


def _fabric(gpu: Handle, info: Any) -> int:
    nvlink = told(gpu, "nvlink")
    info._obj.state = told(nvlink, "fabric")
    info._obj.status = nvlink.get("fabric_status", 0)
    return 0


def _fields(gpu: Handle, ids: Sequence[int]) -> list[SimpleNamespace]:
    """Fields by NVML's numbers: 52 replays, 90 speed of a link, 230 what the driver asks for after an error."""
    nvlink = gpu.get("nvlink", {})
    known = {52: nvlink.get("replays"), 90: nvlink.get("mbyte_s"), 230: gpu.get("recovery")}
    return [
        SimpleNamespace(
            fieldId=field,
            nvmlReturn=3 if known.get(field) is None else 0,
            value=SimpleNamespace(ullVal=known.get(field), uiVal=known.get(field)),
        )
        for field in ids
    ]
