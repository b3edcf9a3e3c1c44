"""Which NVIDIA GPUs this machine has and which of them a job may use. Asks NVML; loads neither CUDA nor torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver reports it; None where the driver does not say.

    Attributes:
        index: the driver's number, in PCI order.
        uuid: survives reordering; what CUDA_VISIBLE_DEVICES may name.
        name: product name.
        memory_total_bytes: memory on the device.
        memory_free_bytes: memory nobody holds at the moment of asking.
        compute_capability: `9.0` for Hopper.
        usable: CUDA_VISIBLE_DEVICES lets the job see it.
    """

    index: int
    uuid: str | None
    name: str | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    compute_capability: str | None
    usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """All GPUs of a machine.

    Attributes:
        gpus: in the driver's order.
        usable_count: devices a job sees: CUDA_VISIBLE_DEVICES applied, a MIG slice counted as one.
        driver: version of the driver.
        driver_cuda: newest CUDA version the driver can run.
        reason: why there are none, where there are none.
    """

    gpus: tuple[Gpu, ...]
    usable_count: int
    driver: str | None
    driver_cuda: str | None
    reason: str | None


def read_gpus(environ: Mapping[str, str], *, load_nvml: Callable[[], Any] | None = None) -> GpuReport:
    """Asks the driver for the GPUs of this machine.

    Args:
        environ: where CUDA_VISIBLE_DEVICES is read.
        load_nvml: returns the `pynvml` module; tests give a made-up one.
    """
    try:
        nvml = (load_nvml or _load_pynvml)()
    except ImportError:
        return _none("the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _none(_why(error))
    try:
        return _read(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError as error:
        return _none(_why(error))
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def visible_devices(value: str | None, uuids: Sequence[str | None]) -> tuple[int | None, ...]:
    """Applies CUDA_VISIBLE_DEVICES by CUDA's own rules.

    The list ends at the first entry that names no device; a device named twice hides all of them; of MIG slices
    a process sees the first only.

    Args:
        value: the variable; None where it is not set.
        uuids: of the machine's GPUs, in order; an entry of the list may be a unique beginning of one.

    Returns:
        indices of the devices left, in the order of the list; None stands for a MIG slice.
    """
    if value is None:
        return tuple(range(len(uuids)))
    chosen: list[int | None] = []
    for entry in value.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            chosen.append(None)
            break
        matches = [index for index, uuid in enumerate(uuids) if _names(name, index, uuid)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return () if len(set(chosen)) < len(chosen) else tuple(chosen)


def _names(entry: str, index: int, uuid: str | None) -> bool:
    if entry.isdecimal():
        return int(entry) == index
    return entry.startswith("GPU-") and uuid is not None and uuid.startswith(entry)


def _load_pynvml() -> Any:
    import pynvml

    return pynvml


def _read(nvml: Any, visible: str | None) -> GpuReport:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
    devices = visible_devices(visible, uuids)
    cuda: int | None = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return GpuReport(
        gpus=tuple(
            _read_one(nvml, handle, index=index, uuid=uuids[index], usable=index in devices)
            for index, handle in enumerate(handles)
        ),
        usable_count=len(devices),
        driver=_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion)),
        driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        reason=None if handles else "the driver finds no GPU",
    )


def _read_one(nvml: Any, handle: Any, *, index: int, uuid: str | None, usable: bool) -> Gpu:
    memory: Any = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability: Any = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        index=index,
        uuid=uuid,
        name=_text(_ask(nvml, nvml.nvmlDeviceGetName, handle)),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        usable=usable,
    )


def _ask(nvml: Any, call: Callable[..., _T], *args: Any) -> _T | None:
    """One question to the driver; None where it has no answer (old driver, MIG, virtual GPU)."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _none(reason: str) -> GpuReport:
    return GpuReport(gpus=(), usable_count=0, driver=None, driver_cuda=None, reason=reason)


def _why(error: Exception) -> str:
    name = type(error).__name__
    if name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
        return "no NVIDIA driver"
    return f"the NVIDIA driver does not answer: {error}"
