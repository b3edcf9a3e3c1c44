"""What hardware and software there is, as one value. Measures nothing, imports no torch and never fails.

What cannot be told is None, with the reason in `null_reasons`. How it is shown is the business of commands/probe.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from .probe_cgroup import CgroupLimits, read_limits
from .probe_gpu import Gpu, GpuReport, read_gpus
from .probe_machine import (
    container_of,
    filesystem_of,
    machine_of,
    parse_cpuinfo,
    parse_meminfo,
    parse_os_release,
    read_text,
    usable_cores,
)
from .probe_versions import Versions, read_versions

#: Raised whenever a field changes its meaning or goes away; new fields do not raise it.
SCHEMA_VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The host. `container` and `machine` are None where nothing tells of one."""

    name: str
    os: str | None
    kernel: str
    arch: str
    container: str | None
    machine: str | None
    virtual: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReport:
    """The processor. `cores_present` are logical ones; `cores_usable` is what affinity and quota leave of them."""

    model: str | None
    cores_present: int
    cores_in_affinity: int
    quota_cores: float | None
    cores_usable: int
    isa: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory in bytes. `usable_bytes` is what a job may take now: free memory or room below the cgroup limit."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_limit_bytes: int | None
    usable_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    shm_total_bytes: int | None
    shm_free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """The filesystem of the working folder (links resolved); `free_bytes` is what an ordinary user may still write."""

    path: str | None
    filesystem: str | None
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkReport:
    """One interface that is up and has an address others may reach."""

    interface: str
    addresses: tuple[str, ...]
    speed_mbit: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Everything `dsrun probe` tells.

    Attributes:
        null_reasons: dotted path of a value that is None -> why.
    """

    host: HostReport
    cpu: CpuReport
    memory: MemoryReport
    cgroup_version: str | None
    gpus: tuple[Gpu, ...]
    gpus_usable: int
    driver: str | None
    driver_cuda: str | None
    disk: DiskReport
    network: tuple[NetworkReport, ...]
    versions: Versions
    null_reasons: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values with the version of their schema first."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


class _Reasons(dict[str, str]):
    """Reasons for what could not be told, gathered while the report is put together."""

    def note(self, path: str, value: _T | None, reason: str) -> _T | None:
        if value is None:
            self[path] = reason
        return value


def probe(
    *, root: Path = Path("/"), environ: Mapping[str, str] | None = None, affinity: Collection[int] | None = None
) -> ProbeReport:
    """Looks at this machine.

    Args:
        root: `/`, or a made-up tree with proc, sys, etc, dev and run.
        environ: this process's environment if None.
        affinity: logical processors this process may run on; asked of the kernel if None.
    """
    env = os.environ if environ is None else environ
    reasons = _Reasons()
    limits = read_limits(root)
    gpus = read_gpus(env)
    return ProbeReport(
        host=_host(root, env, reasons),
        cpu=_cpu(root, limits, os.sched_getaffinity(0) if affinity is None else affinity, reasons),
        memory=_memory(root, limits, reasons),
        cgroup_version=reasons.note("cgroup_version", limits.version, "no control groups are mounted"),
        gpus=_gpus(gpus, reasons),
        gpus_usable=gpus.usable_count,
        driver=reasons.note("driver", gpus.driver, gpus.reason or "the driver does not say"),
        driver_cuda=reasons.note("driver_cuda", gpus.driver_cuda, gpus.reason or "the driver does not say"),
        disk=_disk(root, reasons),
        network=_network(reasons),
        versions=_versions(gpus, reasons),
        null_reasons=dict(reasons),
    )


def count_usable_cores() -> int:
    """Returns the cores this process can keep busy."""
    return usable_cores(os.sched_getaffinity(0), read_limits(Path("/")).quota_cores)


def host_names() -> frozenset[str]:
    """Returns what this machine calls itself, in lower case, with and without its domain; asks no name server."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]})


def _host(root: Path, env: Mapping[str, str], reasons: _Reasons) -> HostReport:
    uname = os.uname()
    release = parse_os_release(read_text(root / "etc/os-release") or "")
    return HostReport(
        name=socket.gethostname(),
        os=reasons.note("host.os", release, "/etc/os-release does not name it"),
        kernel=uname.release,
        arch=uname.machine,
        container=reasons.note("host.container", container_of(root, env), "no sign of a container"),
        machine=reasons.note("host.machine", machine_of(root), "/sys/class/dmi/id does not name it"),
        virtual=reasons.note(
            "host.virtual", parse_cpuinfo(read_text(root / "proc/cpuinfo") or "").virtual, "the processor does not say"
        ),
    )


def _cpu(root: Path, limits: CgroupLimits, affinity: Collection[int], reasons: _Reasons) -> CpuReport:
    info = parse_cpuinfo(read_text(root / "proc/cpuinfo") or "")
    return CpuReport(
        model=reasons.note("cpu.model", info.model, "/proc/cpuinfo does not name it"),
        cores_present=info.cores or os.cpu_count() or 1,
        cores_in_affinity=len(affinity),
        quota_cores=reasons.note("cpu.quota_cores", limits.quota_cores, "no cgroup limits it"),
        cores_usable=usable_cores(affinity, limits.quota_cores),
        isa=info.isa,
    )


def _memory(root: Path, limits: CgroupLimits, reasons: _Reasons) -> MemoryReport:
    info = parse_meminfo(read_text(root / "proc/meminfo") or "")
    available = info.get("MemAvailable")
    room = [value for value in (available, limits.memory_left_bytes) if value is not None]
    shm = _space(root / "dev/shm")
    absent = "/proc/meminfo does not tell it"
    return MemoryReport(
        total_bytes=reasons.note("memory.total_bytes", info.get("MemTotal"), absent),
        available_bytes=reasons.note("memory.available_bytes", available, absent),
        cgroup_limit_bytes=reasons.note("memory.cgroup_limit_bytes", limits.memory_limit_bytes, "no cgroup limits it"),
        usable_bytes=reasons.note("memory.usable_bytes", min(room, default=None), absent),
        swap_total_bytes=reasons.note("memory.swap_total_bytes", info.get("SwapTotal"), absent),
        swap_free_bytes=reasons.note("memory.swap_free_bytes", info.get("SwapFree"), absent),
        shm_total_bytes=reasons.note("memory.shm_total_bytes", shm and shm[0], "there is no /dev/shm"),
        shm_free_bytes=reasons.note("memory.shm_free_bytes", shm and shm[1], "there is no /dev/shm"),
    )


def _gpus(report: GpuReport, reasons: _Reasons) -> tuple[Gpu, ...]:
    for gpu in report.gpus:
        for name, value in asdict(gpu).items():
            reasons.note(f"gpus.{gpu.index}.{name}", value, "the driver does not say")
    return report.gpus


def _disk(root: Path, reasons: _Reasons) -> DiskReport:
    space = _space(Path("."))
    try:
        path = os.getcwd()
    except OSError:
        path = None
    kind = path and filesystem_of(PurePosixPath(path), read_text(root / "proc/self/mountinfo") or "")
    return DiskReport(
        path=reasons.note("disk.path", path, "the working folder is gone"),
        filesystem=reasons.note("disk.filesystem", kind, "/proc/self/mountinfo does not tell it"),
        total_bytes=reasons.note("disk.total_bytes", space and space[0], "statvfs fails"),
        free_bytes=reasons.note("disk.free_bytes", space and space[1], "statvfs fails"),
    )


def _space(path: Path) -> tuple[int, int] | None:
    """Returns (all bytes, bytes an ordinary user may write) of the filesystem at `path`."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _network(reasons: _Reasons) -> tuple[NetworkReport, ...]:
    try:
        import psutil

        addresses, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    except (ImportError, OSError) as error:
        reasons["network"] = f"psutil cannot list the interfaces: {error}"
        return ()
    reports: list[NetworkReport] = []
    for name, found in sorted(addresses.items()):
        reachable = [
            entry.address
            for entry in found
            if entry.family in (socket.AF_INET, socket.AF_INET6)
            and not entry.address.startswith(("127.", "::1", "fe80:"))
        ]
        if reachable and name in stats and stats[name].isup:
            speed = reasons.note(
                f"network.{len(reports)}.speed_mbit", stats[name].speed or None, "the interface does not say"
            )
            reports.append(NetworkReport(interface=name, addresses=tuple(reachable), speed_mbit=speed))
    return tuple(reports)


def _versions(gpus: GpuReport, reasons: _Reasons) -> Versions:
    versions = read_versions()
    reasons.note("versions.dsrun", versions.dsrun, "not installed as a package")
    reasons.note("versions.torch", versions.torch, "not installed beside this interpreter")
    no_cuda = "torch is not installed" if versions.torch is None else "torch is built without CUDA"
    reasons.note("versions.cuda", versions.cuda, no_cuda)
    reasons.note("versions.nccl", versions.nccl, no_cuda if versions.cuda is None else "no nvidia-nccl-* package")
    return versions
