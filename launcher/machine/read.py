"""What hardware and software there is, as one value. Measures nothing, imports no torch and never fails.

Each module knows one kind of thing; here they are put together. What cannot be told is None, with the reason
in `null_reasons`; where values come from stands in `provenance.py`. How a report is shown is the business of
commands/probe.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .cgroup import read_cgroup, read_limits
from .devices.choice import user_of_process
from .devices.unusable import unusable_gpus
from .gpus.nvlink import read_nvlinks, read_peer_access
from .gpus.nvml import NoDriver, ask, open_nvml, text_of
from .gpus.read import Gpu, GpuReport, explained, gpu_handle, list_gpus
from .gpus.state import read_state
from .gpus.xids import DriverErrors, read_driver_errors
from .host import read_host
from .memory import read_memory
from .network.interfaces import Addresses, gloo_interface, nccl_interface, psutil_addresses, read_network, read_rdma
from .network.nccl_sockets import read_libraries
from .pci import PcieLink, pci_address
from .proc_files import parse_cpuinfo, read_text
from .processor.model import read_cpu
from .processor.numa import node_cpus, read_binding, read_numa
from .provenance import WHY, null_reasons
from .report import DiskReport, ProbeReport
from .software.loaded_libraries import LoadedLibraries, UnknownLibraries
from .software.versions import read_software, read_versions
from .storage import PathReport, read_storage
from .topology import iommu_kind, numa_node_of, read_topology
from .verdicts.all import judge

#: Fields of a GPU that a launch does not ask for.
_GPU_STATE = ("pci_address", "numa_node", "iommu", "pcie", "nvlink", "state", "xids", "xid_events")


def probe(
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    affinity: Collection[int] | None = None,
    paths: Sequence[Path] = (),
    load_nvml: Callable[[], Any] | None = None,
    ask_addresses: Callable[[], Addresses] = psutil_addresses,
    import_path: Sequence[str] | None = None,
    gpu_state: bool = True,
) -> ProbeReport:
    """Looks at this machine.

    Args:
        root: `/`, or a made-up tree with proc, sys, etc, dev and run.
        environ: environment variables of this process; None reads them from the system.
        affinity: logical processors this process may run on; asked of the kernel if None.
        paths: folders that a job uses beside the working folder: checkpoints, offload.
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.
        ask_addresses: function that returns the addresses of every interface.
        import_path: folders where packages are looked for; None means `sys.path`.
        gpu_state: ask each GPU how it fares and what it is linked to, which takes milliseconds a GPU; without, the
            report only lists them.
    """
    env = os.environ if environ is None else environ
    allowed = os.sched_getaffinity(0) if affinity is None else affinity
    reasons = dict(WHY)
    info = parse_cpuinfo(read_text(root / "proc/cpuinfo") or "")
    limits = read_limits(root)
    errors = read_driver_errors(root) if gpu_state else "not asked"
    if isinstance(errors, str):
        reasons |= dict.fromkeys(("gpus.*.xids", "gpus.*.xid_events", "topology.switch_events"), errors)
    gpus = _gpus(root, env, load_nvml, reasons, errors, state=gpu_state)
    cpus = node_cpus(root)
    rdma, libraries = read_rdma(root), read_libraries(root, env)
    no_network: dict[str, str] = {}
    network = read_network(root, _addresses(ask_addresses, no_network))
    storage = read_storage(root, [*_working_folder(), *paths])
    host = read_host(root, env, virtual=info.virtual)
    versions = read_versions(import_path, environ=env, root=root)
    no_cuda = "torch is not installed" if versions.torch is None else "torch is built without CUDA"
    reasons |= {"versions.cuda": no_cuda, "versions.nccl": "no nvidia-nccl-* package" if versions.cuda else no_cuda}
    report = ProbeReport(
        host=host,
        cpu=read_cpu(root, info, affinity=allowed, quota_cores=limits.quota_cores),
        memory=read_memory(root, limits),
        cgroup_version=limits.version,
        cgroup=read_cgroup(root, limits),
        numa=read_numa(root, cpus, affinity=allowed, gpus=gpus.gpus, network=network, rdma=rdma, nvme=storage.nvme),
        binding=read_binding(root, env, affinity=allowed, report=gpus, quota_cores=limits.quota_cores),
        gpus=gpus.gpus,
        gpus_usable=gpus.usable_count,
        driver=gpus.driver,
        driver_cuda=gpus.driver_cuda,
        gpus_left_out=gpus.left_out,
        gpus_unlisted=gpus.unlisted,
        gpus_idle=gpus.idle,
        gpus_unusable=unusable_gpus(gpus, env, root=root, import_path=import_path),
        topology=read_topology(
            root, gpus.gpus, rdma, cpus, switch_events=None if isinstance(errors, str) else errors.switches
        ),
        disk=_disk(storage.paths[0] if len(storage.paths) > len(paths) else None),
        storage=storage,
        network=network,
        rdma=rdma,
        nccl_interface=nccl_interface(network, env),
        gloo_interface=gloo_interface(network, env, hosts=read_text(root / "etc/hosts") or "", host_name=host.name),
        nccl_net_plugin=libraries.net_plugin,
        nccl_verbs=libraries.verbs,
        versions=versions,
        software=read_software(env, import_path),
        null_reasons=no_network,
    )
    return completed(report, reasons)


def completed(report: ProbeReport, reasons: Mapping[str, str] = WHY) -> ProbeReport:
    """Returns a report with its verdicts, and a reason for every value that is missing.

    Args:
        report: report of what was found on this machine.
        reasons: dotted path, `*` for numbers, or its beginning -> reason; those of the report that still hold are kept.
    """
    values = asdict(replace(report, verdicts=(), null_reasons={}))
    missing = null_reasons(values, "", {**reasons, **report.null_reasons})
    if not report.network and "network" in report.null_reasons:
        missing["network"] = report.null_reasons["network"]
    return replace(report, verdicts=judge(report), null_reasons=missing)


def with_loaded(report: ProbeReport, loaded: LoadedLibraries | UnknownLibraries) -> ProbeReport:
    """Returns a report with what `loaded_libraries` found, or with the reason why it found nothing."""
    if isinstance(loaded, LoadedLibraries):
        return completed(replace(report, loaded=loaded))
    return completed(replace(report, loaded=None, null_reasons={**report.null_reasons, "loaded": loaded.reason}))


def _gpus(
    root: Path,
    environ: Mapping[str, str],
    load_nvml: Callable[[], Any] | None,
    reasons: dict[str, str],
    errors: DriverErrors | str,
    *,
    state: bool,
) -> GpuReport:
    failure: NoDriver | None = None
    try:
        with open_nvml(load_nvml) as nvml:
            report = list_gpus(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
            if state:
                report = replace(report, gpus=_all_detailed(nvml, report.gpus, root, errors))
            else:
                reasons |= {f"gpus.*.{name}": "not asked" for name in _GPU_STATE}
    except NoDriver as error:
        failure = error
        report = GpuReport(gpus=(), usable_count=0, driver=None, driver_cuda=None, reason=str(error))
    report = explained(report, failure, environ=environ, root=root)
    if report.reason is not None:
        reasons |= {"driver": report.reason, "driver_cuda": report.reason}
    return report


def _all_detailed(nvml: Any, gpus: Sequence[Gpu], root: Path, errors: DriverErrors | str) -> tuple[Gpu, ...]:
    if not gpus:
        return ()
    from concurrent.futures import ThreadPoolExecutor

    handles = [gpu_handle(nvml, gpu.index) for gpu in gpus]
    # A GPU takes milliseconds for some answers, and others need not wait for it: NVML may be asked by many threads.
    with ThreadPoolExecutor(len(gpus)) as pool:
        asked = [pool.submit(_detailed, nvml, gpu, handles, root, errors) for gpu in gpus]
        return tuple(future.result() for future in asked)


def _detailed(nvml: Any, gpu: Gpu, handles: Sequence[Any], root: Path, errors: DriverErrors | str) -> Gpu:
    handle = handles[gpu.index]
    if handle is None:
        return gpu
    info = ask(nvml, "nvmlDeviceGetPciInfo", handle)
    address = None if info is None else pci_address(text_of(info.busId) or "")
    return replace(
        gpu,
        pci_address=address,
        numa_node=None if address is None else numa_node_of(root, address),
        iommu=None if address is None else iommu_kind(root, address),
        pcie=PcieLink(
            generation=ask(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
            width=ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
            generation_max=ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
            width_max=ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        ),
        nvlink=read_nvlinks(nvml, handle),
        peer_access=read_peer_access(nvml, handle, gpu.index, handles),
        state=read_state(nvml, handle, user_of=lambda pid: user_of_process(pid, proc=root / "proc")),
        xids=None if isinstance(errors, str) or address is None else errors.xids.get(address, ()),
        xid_events=None if isinstance(errors, str) or address is None else errors.events.get(address, ()),
    )


def _addresses(ask_addresses: Callable[[], Addresses], reasons: dict[str, str]) -> Addresses:
    try:
        return ask_addresses()
    except (ImportError, OSError) as error:
        reasons["network"] = f"psutil cannot list the interfaces: {error}"
        return {}


def _working_folder() -> list[Path]:
    try:
        return [Path.cwd()]
    except OSError:
        return []


def _disk(folder: PathReport | None) -> DiskReport:
    return DiskReport(
        path=None if folder is None else folder.path,
        filesystem=None if folder is None else folder.filesystem,
        total_bytes=None if folder is None else folder.total_bytes,
        free_bytes=None if folder is None else folder.free_bytes,
    )
