"""Which NVIDIA GPUs this machine has and which of them a job may use. Asks NVML; loads neither CUDA nor torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
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
        slice_count: how many of the usable devices are MIG slices named in CUDA_VISIBLE_DEVICES.
    """

    gpus: tuple[Gpu, ...]
    usable_count: int
    driver: str | None
    driver_cuda: str | None
    reason: str | None
    slice_count: int = 0


class NoDriver(Exception):
    """The driver does not answer; the text says why."""


def read_gpus(environ: Mapping[str, str], *, load_nvml: Callable[[], Any] | None = None) -> GpuReport:
    """Asks the driver for the GPUs of this machine.

    Args:
        environ: where CUDA_VISIBLE_DEVICES is read.
        load_nvml: returns the `pynvml` module; tests give a made-up one.
    """
    try:
        with open_nvml(load_nvml) as nvml:
            return _read(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    except NoDriver as error:
        return GpuReport(gpus=(), usable_count=0, driver=None, driver_cuda=None, reason=str(error))


@contextlib.contextmanager
def open_nvml(load_nvml: Callable[[], Any] | None = None) -> Generator[Any, None, None]:
    """Gives the `pynvml` module, ready to be asked, and shuts it down at the end.

    Args:
        load_nvml: returns the module; tests give a made-up one.

    Raises:
        NoDriver: there is none, or it failed at a question inside.
    """
    try:
        nvml = (load_nvml or _load_pynvml)()
    except ImportError:
        raise NoDriver("the package nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriver(_why(error)) from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NoDriver(_why(error)) from error
    finally:
        ask_driver(nvml, nvml.nvmlShutdown)


def listed_devices(value: str | None, uuids: Sequence[str | None]) -> tuple[int | str, ...]:
    """Applies CUDA_VISIBLE_DEVICES by CUDA's own rules, except that a job may have several MIG slices.

    The list ends at the first entry that names no device; a device named twice hides all of them. Of MIG slices a
    process sees the first only, so a job with several gives each rank one of them (`devices.Held`).

    Args:
        value: the variable; None where it is not set.
        uuids: of the machine's GPUs, in order; an entry of the list may be a unique beginning of one.

    Returns:
        the devices left, in the order of the list: indices of GPUs and names of MIG slices.
    """
    if value is None:
        return tuple(range(len(uuids)))
    chosen: list[int | str] = []
    for entry in value.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            chosen.append(name)
            continue
        matches = [index for index, uuid in enumerate(uuids) if _names(name, index, uuid)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return () if len(set(chosen)) < len(chosen) else tuple(chosen)


def visible_devices(value: str | None, uuids: Sequence[str | None]) -> tuple[int | None, ...]:
    """Returns what `listed_devices` does, with None for a MIG slice."""
    return tuple(entry if isinstance(entry, int) else None for entry in listed_devices(value, uuids))


def _names(entry: str, index: int, uuid: str | None) -> bool:
    if entry.isdecimal():
        return int(entry) == index
    return entry.startswith("GPU-") and uuid is not None and uuid.startswith(entry)


def _load_pynvml() -> Any:
    import pynvml

    return pynvml


def _read(nvml: Any, visible: str | None) -> GpuReport:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [text_of(ask_driver(nvml, nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
    devices = visible_devices(visible, uuids)
    cuda: int | None = ask_driver(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return GpuReport(
        gpus=tuple(
            _read_one(nvml, handle, index=index, uuid=uuids[index], usable=index in devices)
            for index, handle in enumerate(handles)
        ),
        usable_count=len(devices),
        driver=text_of(ask_driver(nvml, nvml.nvmlSystemGetDriverVersion)),
        driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        reason=None if handles else "the driver finds no GPU",
        slice_count=devices.count(None),
    )


def _read_one(nvml: Any, handle: Any, *, index: int, uuid: str | None, usable: bool) -> Gpu:
    memory: Any = ask_driver(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability: Any = ask_driver(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        index=index,
        uuid=uuid,
        name=text_of(ask_driver(nvml, nvml.nvmlDeviceGetName, handle)),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        usable=usable,
    )


def ask_driver(nvml: Any, call: Callable[..., _T], *args: Any) -> _T | None:
    """One question to the driver; None where it has no answer (old driver, MIG, virtual GPU)."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def text_of(value: Any) -> str | None:
    """Returns a text of the driver, which older versions give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _why(error: Exception) -> str:
    name = type(error).__name__
    if name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
        return "no NVIDIA driver"
    return f"the NVIDIA driver does not answer: {error}"
