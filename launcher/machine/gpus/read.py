"""Which NVIDIA GPUs this machine has and which of them a job may use. Asks NVML; loads neither CUDA nor torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun.host.gpu_presence import hides_all_gpus, nvidia_open_files, nvidia_presence

from ...plan.launch_plan import GpuPlace
from ..pci import PcieLink, pci_address
from .driver_fault import DriverFault, fault_at_start, fault_of_all, fault_of_choice, fault_of_none, idle_text
from .left_out import LeftOut, LeftOutGpus, left_out_gpus
from .mig import slice_handles
from .nvlink import NvLinks
from .nvml import NoDriver, ask, ask_driver, error_name, error_words, open_nvml, text_of
from .state import GpuState
from .visible import listed_devices, visible_devices
from .xids import XidEvent


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
        cuda_index: its number to the job, `cuda:0` first, where CUDA sorts by PCI address (it does among equal GPUs);
            None where the job does not see it as a whole.
        lost: the driver counts it and cannot reach it, or this process may not.
        pci_address: PCI address of the GPU as /sys writes it, `0000:1b:00.0`; None where the driver does not say.
        numa_node: the node its slot is wired to.
        iommu: kind of the IOMMU's domain for it (`identity`, `DMA`, `DMA-FQ`); asked by the probe alone, as the rest.
        pcie: its link to the board.
        nvlink: its links to others.
        peer_access: whether it may read each GPU's memory, in their order: `X`, `OK` or why not (probe_nvlink).
        state: condition of the GPU: memory errors, power, clocks, heat, modes and processes; None where it was not
            asked for.
        xids: errors of it that the driver wrote to the kernel's log, oldest first.
        xid_events: the last of each kind of them, with what the driver said and when.
    """

    index: int
    uuid: str | None
    name: str | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    compute_capability: str | None
    usable: bool
    cuda_index: int | None = None
    lost: bool = False
    pci_address: str | None = None
    numa_node: int | None = None
    iommu: str | None = None
    pcie: PcieLink | None = None
    nvlink: NvLinks | None = None
    peer_access: tuple[str, ...] = ()
    state: GpuState | None = None
    xids: tuple[int, ...] | None = None
    xid_events: tuple[XidEvent, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """All GPUs of a machine.

    Attributes:
        gpus: GPUs that the driver counts, in its order.
        usable_count: devices a job sees: CUDA_VISIBLE_DEVICES applied, a MIG slice counted as one.
        driver: version of the driver.
        driver_cuda: newest CUDA version the driver can run.
        reason: reason why there are no GPUs, or none that can be used; None where there are some.
        left_out: GPUs that the driver counts and no job can use.
        unlisted: GPUs that this process was given and the driver does not count: it could not start them.
        fault: fault that keeps this process from all GPUs it was given; None without one, or where CUDA_VISIBLE_DEVICES
            says that none is to be used.
        idle: sentence about GPUs that this process was not given; None without any.
        places: UUIDs, PCI addresses, models and MIG slices of the GPUs that CUDA counts, in CUDA's order.
    """

    gpus: tuple[Gpu, ...]
    usable_count: int
    driver: str | None
    driver_cuda: str | None
    reason: str | None
    left_out: tuple[LeftOut, ...] = ()
    unlisted: int = 0
    fault: DriverFault | None = None
    idle: str | None = None
    places: tuple[GpuPlace, ...] = ()


def read_gpus(
    environ: Mapping[str, str], *, load_nvml: Callable[[], Any] | None = None, root: Path = Path("/")
) -> GpuReport:
    """Asks the driver for the GPUs of this machine, and where it has none to give, the kernel why that is.

    Args:
        environ: environment variables, of which CUDA_VISIBLE_DEVICES is read.
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.
        root: `/`, or a made-up tree with proc, sys and dev.
    """
    failure: NoDriver | None = None
    try:
        with open_nvml(load_nvml) as nvml:
            report = list_gpus(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    except NoDriver as error:
        failure = error
        report = GpuReport(gpus=(), usable_count=0, driver=None, driver_cuda=None, reason=str(error))
    return explained(report, failure, environ=environ, root=root)


def explained(
    report: GpuReport, failure: NoDriver | None, *, environ: Mapping[str, str], root: Path = Path("/")
) -> GpuReport:
    """Returns a report that says whether it is the driver's fault that there is no GPU, or nobody's.

    Args:
        report: report of the GPUs, as the driver told of them.
        failure: error by which the driver told nothing; None where it answered.
        environ: environment variables, of which CUDA_VISIBLE_DEVICES is read.
        root: `/`, or a made-up tree with proc, sys and dev.
    """
    if hides_all_gpus(environ):
        return report
    if len(report.left_out) < len(report.gpus):
        report = replace(report, unlisted=_unlisted(root, len(report.gpus)))
        if report.usable_count:
            return report
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        named = listed_devices(visible, [place.uuid for place in report.places], slices=slice_names(report.places))
        fault = fault_of_choice(visible, len(report.places), are_cut=bool(named))
        if not named:
            left_out = left_out_of(report)
            reason = "; ".join([fault.reason, *(one.text for one in left_out)])
            fault = DriverFault(reason=reason, way_out="; ".join([fault.way_out, *(one.fix for one in left_out)]))
        return replace(report, reason=fault.reason, fault=fault)
    presence = nvidia_presence(root)
    if failure is not None:
        fault = fault_at_start(failure.error, failure.words, presence)
    elif report.left_out:
        reasons = [gpu.reason for gpu in report.left_out]
        fault = fault_of_all(reasons, presence, forbidden=all(gpu.is_forbidden for gpu in report.left_out))
    else:
        fault = fault_of_none(presence)
    if fault is not None:
        return replace(report, reason=fault.reason, fault=fault)
    idle = idle_text(presence)
    return report if idle is None else replace(report, reason=idle, idle=idle)


def _unlisted(root: Path, listed: int) -> int:
    """Counts GPUs that this process was given and the driver does not list."""
    files = nvidia_open_files(root)
    if files <= listed:
        return 0
    drivers = nvidia_presence(root).cards.values()
    ours = sum(driver in (None, "nvidia") for driver in drivers)
    # The file of a card that was handed to a virtual machine since the boot stays; one handed over at boot has none.
    return max(0, min(files, ours) - listed, files - listed - (len(drivers) - ours))


def left_out_of(report: GpuReport) -> tuple[LeftOutGpus, ...]:
    """Says which GPUs of a machine no job can use while others are used.

    Args:
        report: answer of the driver.
    """
    reached = [gpu for gpu in report.gpus if not gpu.lost]
    uncut = [gpu.index for gpu, place in zip(reached, report.places, strict=True) if place.slices == ()]
    return tuple(left_out_gpus(report.left_out, uncut=uncut, unlisted=report.unlisted))


def device_count(report: GpuReport, visible: str | None) -> int:
    """Counts the devices that ranks may have one each: GPUs that are whole, and slices of those that are cut.

    Args:
        report: answer of the driver.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set. Of a cut GPU that it names CUDA shows one slice.
    """
    if visible is not None:
        return report.usable_count
    return sum(1 if place.slices is None else len(place.slices) for place in report.places)


def list_gpus(nvml: Any, visible: str | None) -> GpuReport:
    """Lists the GPUs of an open driver, those that cannot be reached or opened too.

    CUDA_VISIBLE_DEVICES counts those that are left, as CUDA does not count a GPU that it may not open; numbers of the
    report are the driver's. A GPU in MIG mode without slices is counted, and no job sees it.

    Args:
        nvml: the open driver.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    handles = [_reach(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    left_out = tuple(handle for handle in handles if isinstance(handle, LeftOut))
    places = {index: _place(nvml, gpu) for index, gpu in enumerate(handles) if not isinstance(gpu, LeftOut)}
    there = list(places)
    named = visible_devices(visible, [place.uuid for place in places.values()], slices=slice_names(places.values()))
    devices = [
        None if place is None else there[place] for place in named if place is None or places[there[place]].slices != ()
    ]
    cuda: int | None = ask_driver(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return GpuReport(
        gpus=tuple(
            _lost(index)
            if isinstance(handle, LeftOut)
            else _read_one(nvml, handle, index=index, uuid=places[index].uuid, devices=devices)
            for index, handle in enumerate(handles)
        ),
        usable_count=len(devices),
        driver=text_of(ask_driver(nvml, nvml.nvmlSystemGetDriverVersion)),
        driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        reason=None if handles else "the driver finds no GPU",
        left_out=left_out,
        places=tuple(places.values()),
    )


def slice_names(places: Iterable[GpuPlace]) -> frozenset[str]:
    """Returns the names of all slices of GPUs."""
    return frozenset(name for place in places for name in place.slices or ())


def _place(nvml: Any, handle: Any) -> GpuPlace:
    info = ask(nvml, "nvmlDeviceGetPciInfo", handle)
    slices = slice_handles(nvml, handle)
    return GpuPlace(
        uuid=text_of(ask_driver(nvml, nvml.nvmlDeviceGetUUID, handle)),
        address=None if info is None else pci_address(text_of(info.busId) or ""),
        model=text_of(ask_driver(nvml, nvml.nvmlDeviceGetName, handle)),
        slices=None
        if slices is None
        else tuple(text_of(ask_driver(nvml, nvml.nvmlDeviceGetUUID, part)) or "" for _, part in slices),
    )


def gpu_handle(nvml: Any, index: int) -> Any:
    """Returns the driver's handle of a GPU; None for one that cannot be reached, or may not be opened."""
    return ask_driver(nvml, nvml.nvmlDeviceGetHandleByIndex, index)


def _reach(nvml: Any, index: int) -> Any:
    """Returns the driver's handle of a GPU, or why there is none."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return LeftOut(index=index, reason=error_words(error), is_forbidden=error_name(error) == "NoPermission")


def _lost(index: int) -> Gpu:
    return Gpu(
        index=index,
        uuid=None,
        name=None,
        memory_total_bytes=None,
        memory_free_bytes=None,
        compute_capability=None,
        usable=False,
        lost=True,
    )


def _read_one(nvml: Any, handle: Any, *, index: int, uuid: str | None, devices: Sequence[int | None]) -> Gpu:
    memory: Any = ask_driver(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability: Any = ask_driver(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        index=index,
        uuid=uuid,
        name=text_of(ask_driver(nvml, nvml.nvmlDeviceGetName, handle)),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        usable=index in devices,
        cuda_index=devices.index(index) if index in devices else None,
    )
