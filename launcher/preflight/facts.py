"""Facts of one host on which a job may fail or limp: versions, GPUs, limits, files, clock. See [Note: questions].

Answers for preflight, in a fraction of a second and without torch; judges nothing. The probe tells much more of a host;
here is what is compared before every launch.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError

from ..machine.cgroup import read_limits
from ..machine.devices.choice import Device, driver_open, read_devices
from ..machine.devices.unusable import UnusableGpus, unusable_gpus
from ..machine.gpus.left_out import LeftOutGpus
from ..machine.gpus.read import Gpu, GpuReport, left_out_of, read_gpus
from ..machine.known_fields import known_fields
from ..machine.limits import LimitsReport, read_process_limits, user_name
from ..machine.memory import MemoryReport, read_memory
from ..machine.network.interfaces import RdmaDevice, read_rdma
from ..machine.network.nccl_sockets import NET_VARIABLES, read_libraries, why_no_sockets
from ..machine.network.rdma import RdmaFacts, rdma_facts
from ..machine.proc_files import read_text, usable_cores
from ..machine.software.versions import Versions, read_versions
from ..machine.storage import Room, room_of
from ..plan.launch_plan import GpuPlace
from .file_facts import FileFacts, code_digests, file_facts, folder_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGpu:
    """A GPU or MIG slice that ranks may see.

    Attributes:
        device: device as a job takes it, with its users.
        gpu: report of the driver; None for a slice.
    """

    device: Device
    gpu: Gpu | None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobGpu:
        """Makes one of its JSON form."""
        device = known_fields(Device, value["device"])
        device["used_by"] = tuple(device.get("used_by", ()))
        gpu: dict[str, Any] | None = None if value["gpu"] is None else known_fields(Gpu, value["gpu"])
        if gpu is not None:
            # Of what the probe alone asks for there is nothing.
            gpu["peer_access"] = ()
        return cls(device=Device(**device), gpu=None if gpu is None else Gpu(**gpu))

    @property
    def model(self) -> str | None:
        """Product name; None where the driver does not say."""
        return None if self.gpu is None else self.gpu.name


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What one host says of itself; None where it cannot be told, or was not asked for.

    Attributes:
        user: name of the user that dsrun runs as on the host.
        kernel: its release.
        glibc: the C library, `glibc 2.36`.
        place: the same for two names of one machine, different for two containers of it.
        versions: versions of what is installed beside the interpreter on the host.
        driver: NVIDIA's, its version.
        driver_cuda: newest CUDA version it runs.
        gpus: those a job may see.
        gpu_places: places of the GPUs that CUDA counts, in CUDA's order, whatever CUDA_VISIBLE_DEVICES says.
        no_gpus: reason why a job sees no GPU on the host; None where it sees some.
        gpus_unusable: reason why no GPU can be used where there should be some, with a fix; None where that is not so.
        left_out: GPUs that no job can use while others of the host are used.
        cores_usable: affinity and quota applied.
        memory: memory of the machine, of its cgroups and of /dev/shm.
        limits: resource limits of a process that starts on the host; None where /proc does not tell them.
        rdma: cards that do RDMA.
        no_sockets: reason why NCCL takes no sockets on the host, see `why_no_sockets`; None if it takes them.
        net_plugin: path of the library by which NCCL takes other networks; None where the loader finds none.
        net_variables: names of the variables that choose NCCL's network for the ranks there.
        folder_fault: reason why the working folder cannot be used; None if it can.
        folder_free_bytes: bytes that this user may still write in the working folder; None where that was not asked or
            cannot be told.
        files: those the job needs, by what they are: `script`.
        code: digest of each Python file in the working folder, by relative path; None where there are too many.
        paths: folders that the job will write to, as they are on the host.
        asked_s: time by this host's clock when the question came, seconds since the epoch.
        answered_s: the same when the answer was ready.
    """

    user: str
    kernel: str
    glibc: str | None
    place: str
    versions: Versions
    driver: str | None
    driver_cuda: str | None
    gpus: tuple[JobGpu, ...]
    no_gpus: str | None
    gpu_places: tuple[GpuPlace, ...] = ()
    gpus_unusable: UnusableGpus | None = None
    left_out: tuple[LeftOutGpus, ...] = ()
    cores_usable: int
    memory: MemoryReport
    limits: LimitsReport | None
    rdma: tuple[RdmaDevice, ...]
    no_sockets: str | None
    net_plugin: str | None = None
    net_variables: tuple[str, ...] = ()
    folder_fault: str | None
    folder_free_bytes: int | None
    files: Mapping[str, FileFacts]
    code: Mapping[str, str] | None
    paths: tuple[Room, ...]
    asked_s: float
    answered_s: float

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostFacts:
        """Makes facts of what `facts` answered."""
        known: dict[str, Any] = {
            **{name: value[name] for name in cls.__dataclass_fields__},
            # The other dsrun may tell more or less of each thing. See `known_fields`.
            "versions": Versions(**known_fields(Versions, value["versions"])),
            "memory": MemoryReport.from_json(value["memory"]),
            "limits": None if value["limits"] is None else LimitsReport(**known_fields(LimitsReport, value["limits"])),
            "gpus": tuple(map(JobGpu.from_json, value["gpus"])),
            "gpus_unusable": None
            if value["gpus_unusable"] is None
            else UnusableGpus(**known_fields(UnusableGpus, value["gpus_unusable"])),
            "gpu_places": tuple(GpuPlace(**known_fields(GpuPlace, place)) for place in value["gpu_places"]),
            "rdma": tuple(map(RdmaDevice.from_json, value["rdma"])),
            "net_variables": tuple(value["net_variables"]),
            "files": {kind: FileFacts(**known_fields(FileFacts, file)) for kind, file in value["files"].items()},
            "paths": tuple(Room(**known_fields(Room, path)) for path in value["paths"]),
            "left_out": tuple(map(LeftOutGpus.from_json, value["left_out"])),
        }
        return cls(**known)

    @property
    def ports(self) -> tuple[RdmaFacts, ...]:
        """Ports for RDMA that work, of cards that ranks may open."""
        return rdma_facts(self.rdma)


def facts(arguments: Mapping[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Answers with this host's `HostFacts`.

    Args:
        arguments: `folder`, the working folder, or None; `files`, paths by what they are; `code`, whether the folder's
            Python files are wanted; `paths`, a list of folders the job will write to; `env`, variables for the ranks of
            this host alone.
        keep: exit stack of the survey; not needed here.
    """
    asked_s = time.time()
    folder: str | None = arguments["folder"]
    files: dict[str, str] = arguments["files"]
    base = folder or os.getcwd()
    unusable = None if folder is None else folder_fault(folder)
    return asdict(
        read_facts(
            {**os.environ, **arguments["env"]},
            folder_fault=unusable,
            folder_free_bytes=None if folder is None or unusable else room_of(folder).free_bytes,
            files={kind: file_facts(os.path.join(base, path)) for kind, path in files.items()},
            code=code_digests(folder) if arguments["code"] and folder is not None and unusable is None else None,
            paths=tuple(room_of(os.path.join(base, path)) for path in arguments["paths"]),
            asked_s=asked_s,
        )
    )


def read_facts(
    environ: Mapping[str, str],
    *,
    folder_fault: str | None = None,
    folder_free_bytes: int | None = None,
    files: Mapping[str, FileFacts] | None = None,
    code: Mapping[str, str] | None = None,
    paths: tuple[Room, ...] = (),
    asked_s: float,
    load_nvml: Callable[[], Any] | None = None,
    root: Path = Path("/"),
) -> HostFacts:
    """Looks at this machine.

    Args:
        environ: environment variables, of which CUDA_VISIBLE_DEVICES and those for NCCL and libraries are read.
        folder_fault: reason why the working folder cannot be used, None if it can; see `HostFacts`.
        folder_free_bytes: bytes that this user may still write in the working folder, None where that is not known; see
            `HostFacts`.
        files: files that the job needs, by what they are (`script`), None for no files; see `HostFacts`.
        code: digest of each Python file in the working folder, by relative path; None where there are too many. See
            `HostFacts`.
        paths: folders that the job will write to; see `HostFacts`.
        asked_s: time by this host's clock when the question came, seconds since the epoch; see `HostFacts`.
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.
        root: `/`, or a made-up tree.
    """
    cgroup = read_limits(root)
    report, devices = _read_driver(environ, load_nvml, root)
    unusable = None if devices else unusable_gpus(report, environ, root=root)
    cards, libraries = read_rdma(root), read_libraries(root, environ)
    return HostFacts(
        user=user_name(),
        kernel=platform.release(),
        glibc=_glibc(),
        place=_place(),
        versions=read_versions(environ=environ),
        driver=report.driver,
        driver_cuda=report.driver_cuda,
        gpus=job_gpus(report.gpus, devices),
        gpu_places=report.places,
        no_gpus=None if devices else _why_none(report, unusable),
        gpus_unusable=unusable,
        left_out=left_out_of(report) if devices else (),
        cores_usable=usable_cores(os.sched_getaffinity(0), cgroup.quota_cores),
        memory=read_memory(root, cgroup),
        limits=read_process_limits(root),
        rdma=cards,
        no_sockets=why_no_sockets(environ, cards, libraries=libraries),
        net_plugin=libraries.net_plugin,
        net_variables=tuple(name for name in NET_VARIABLES if name in environ),
        folder_fault=folder_fault,
        folder_free_bytes=folder_free_bytes,
        files=files or {},
        code=code,
        paths=paths,
        asked_s=asked_s,
        answered_s=time.time(),
    )


def job_gpus(gpus: Sequence[Gpu], devices: Sequence[Device]) -> tuple[JobGpu, ...]:
    """Joins who is on GPUs with what the driver says of them, in the order in which ranks see them.

    Args:
        gpus: all of the machine.
        devices: those a job may see.
    """
    by_name = {gpu.uuid or str(gpu.index): gpu for gpu in gpus}
    return tuple(JobGpu(device=device, gpu=by_name.get(device.name)) for device in devices)


def _read_driver(
    environ: Mapping[str, str], load_nvml: Callable[[], Any] | None, root: Path
) -> tuple[GpuReport, tuple[Device, ...]]:
    try:
        with driver_open(load_nvml):
            report = read_gpus(environ, load_nvml=load_nvml, root=root)
            return report, read_devices(environ, load_nvml=load_nvml, root=root) if report.gpus else ()
    except DsrunError:
        # The report says why the driver does not answer.
        return read_gpus(environ, load_nvml=load_nvml, root=root), ()


def _why_none(report: GpuReport, unusable: UnusableGpus | None) -> str:
    """Returns why there is no GPU."""
    if report.fault is not None:
        return report.fault.reason
    if unusable is not None:
        return unusable.text
    return report.reason or "CUDA_VISIBLE_DEVICES hides all of them"


def _place() -> str:
    """Names where this process is: the boot, and the namespaces in which containers of one machine differ."""
    boot = (read_text(Path("/proc/sys/kernel/random/boot_id")) or "").strip()
    spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "mnt")]
    return " ".join([boot, *spaces])


def _glibc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        # Another C library has no such name.
        return None
