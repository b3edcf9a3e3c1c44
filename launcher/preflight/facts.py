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
from ..machine.gpus.read import Gpu, GpuReport, left_out_texts, read_gpus
from ..machine.limits import LimitsReport, read_process_limits, user_name
from ..machine.memory import MemoryReport, read_memory
from ..machine.network.interfaces import read_rdma
from ..machine.network.nccl_sockets import read_no_sockets
from ..machine.network.rdma import RdmaFacts, rdma_facts
from ..machine.proc_files import read_text, usable_cores
from ..machine.software.versions import Versions, read_versions
from ..plan.launch_plan import GpuPlace
from .file_facts import FileFacts, PathFacts, code_digests, file_facts, folder_fault, path_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """A GPU or MIG slice that ranks may see; None where the driver does not say.

    Attributes:
        index: the driver's number; None for a slice.
        label: for people.
        model: product name.
        total_bytes: its memory.
        free_bytes: memory nobody holds.
        used_by: who computes there, in words.
        compute_capability: `9.0` for Hopper.
    """

    index: int | None
    label: str
    model: str | None
    total_bytes: int | None
    free_bytes: int | None
    used_by: tuple[str, ...]
    compute_capability: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "used_by", tuple(self.used_by))  # JSON has lists only


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What one host says of itself; None where it cannot be told, or was not asked for.

    Attributes:
        user: whom dsrun runs as there.
        kernel: its release.
        glibc: the C library, `glibc 2.36`.
        place: the same for two names of one machine, different for two containers of it.
        versions: of what is installed beside the interpreter there.
        driver: NVIDIA's, its version.
        driver_cuda: newest CUDA version it runs.
        gpus: those a job may see.
        gpu_places: where those are that CUDA counts, in its order, whatever CUDA_VISIBLE_DEVICES says.
        no_gpus: why there are none, where there are none.
        gpus_unusable: why none can be used where there should be some; None where that is not so.
        left_out: GPUs that no job can use while others of the host are used, in words.
        cores_usable: affinity and quota applied.
        memory: of the machine, its cgroups and /dev/shm.
        limits: of a process that starts there; None where /proc does not tell them.
        rdma: ports for RDMA that work.
        no_sockets: why NCCL takes no sockets there, see `why_no_sockets`; None if it takes them.
        folder_fault: why the working folder cannot be used; None if it can.
        folder_free_bytes: what this user may still write there.
        files: those the job needs, by what they are: `script`.
        code: digest of each Python file in the working folder, by relative path; None where there are too many.
        paths: where the job will write.
        asked_s: this host's clock when the question came, seconds since the epoch.
        answered_s: the same when the answer was ready.
    """

    user: str
    kernel: str
    glibc: str | None
    place: str
    versions: Versions
    driver: str | None
    driver_cuda: str | None
    gpus: tuple[GpuFacts, ...]
    no_gpus: str | None
    gpu_places: tuple[GpuPlace, ...] = ()
    gpus_unusable: UnusableGpus | None = None
    left_out: tuple[str, ...] = ()
    cores_usable: int
    memory: MemoryReport
    limits: LimitsReport | None
    rdma: tuple[RdmaFacts, ...]
    no_sockets: str | None
    folder_fault: str | None
    folder_free_bytes: int | None
    files: Mapping[str, FileFacts]
    code: Mapping[str, str] | None
    paths: tuple[PathFacts, ...]
    asked_s: float
    answered_s: float

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostFacts:
        """Makes facts of what `facts` answered."""
        gpus: list[dict[str, Any]] = value["gpus"]
        known: dict[str, Any] = {
            **{name: value[name] for name in cls.__dataclass_fields__},
            # The other dsrun may tell other versions too.
            "versions": Versions(**{name: value["versions"].get(name) for name in Versions.__dataclass_fields__}),
            "memory": MemoryReport.from_json(value["memory"]),
            "limits": None if value["limits"] is None else LimitsReport(**value["limits"]),
            "gpus": tuple(GpuFacts(**gpu) for gpu in gpus),
            "gpus_unusable": None if value["gpus_unusable"] is None else UnusableGpus(**value["gpus_unusable"]),
            "gpu_places": tuple(GpuPlace(**place) for place in value["gpu_places"]),
            "rdma": tuple(RdmaFacts(**port) for port in value["rdma"]),
            "files": {kind: FileFacts(**file) for kind, file in value["files"].items()},
            "paths": tuple(PathFacts(**path) for path in value["paths"]),
            "left_out": tuple(value["left_out"]),
        }
        return cls(**known)


def facts(arguments: Mapping[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Answers with this host's `HostFacts`.

    Args:
        arguments: `folder`, the working folder, or None; `files`, paths by what they are; `code`, whether the folder's
            Python files are wanted; `paths`, a list of folders the job will write to; `env`, variables for the ranks of
            this host alone.
        keep: not needed.
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
            folder_free_bytes=None if folder is None or unusable else path_facts(folder).free_bytes,
            files={kind: file_facts(os.path.join(base, path)) for kind, path in files.items()},
            code=code_digests(folder) if arguments["code"] and folder is not None and unusable is None else None,
            paths=tuple(path_facts(os.path.join(base, path)) for path in arguments["paths"]),
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
    paths: tuple[PathFacts, ...] = (),
    asked_s: float,
    load_nvml: Callable[[], Any] | None = None,
    root: Path = Path("/"),
) -> HostFacts:
    """Looks at this machine.

    Args:
        environ: where CUDA_VISIBLE_DEVICES is read.
        folder_fault: see `HostFacts`.
        folder_free_bytes: see there.
        files: see there.
        code: see there.
        paths: see there.
        asked_s: see there.
        load_nvml: returns the `pynvml` module; tests give a made-up one.
        root: `/`, or a made-up tree.
    """
    cgroup = read_limits(root)
    report, devices = _read_driver(environ, load_nvml, root)
    unusable = None if devices else unusable_gpus(report, environ, root=root)
    cards = read_rdma(root)
    return HostFacts(
        user=user_name(),
        kernel=platform.release(),
        glibc=_glibc(),
        place=_place(),
        versions=read_versions(environ=environ),
        driver=report.driver,
        driver_cuda=report.driver_cuda,
        gpus=gpu_facts(report.gpus, devices),
        gpu_places=report.places,
        no_gpus=None if devices else _why_none(report, unusable),
        gpus_unusable=unusable,
        left_out=tuple(left_out_texts(report)) if devices else (),
        cores_usable=usable_cores(os.sched_getaffinity(0), cgroup.quota_cores),
        memory=read_memory(root, cgroup),
        limits=read_process_limits(root),
        rdma=rdma_facts(cards),
        no_sockets=read_no_sockets(root, environ, cards),
        folder_fault=folder_fault,
        folder_free_bytes=folder_free_bytes,
        files=files or {},
        code=code,
        paths=paths,
        asked_s=asked_s,
        answered_s=time.time(),
    )


def gpu_facts(gpus: Sequence[Gpu], devices: Sequence[Device]) -> tuple[GpuFacts, ...]:
    """Joins what the driver says of GPUs with who is on them, in the order in which ranks see them.

    Args:
        gpus: all of the machine.
        devices: those a job may see.
    """
    by_name = {gpu.uuid or str(gpu.index): gpu for gpu in gpus}
    found: list[GpuFacts] = []
    for device in devices:
        gpu = by_name.get(device.name)
        found.append(
            GpuFacts(
                index=None if gpu is None else gpu.index,
                label=device.label,
                model=None if gpu is None else gpu.name,
                total_bytes=None if gpu is None else gpu.memory_total_bytes,
                free_bytes=None if gpu is None else gpu.memory_free_bytes,
                used_by=device.used_by,
                compute_capability=None if gpu is None else gpu.compute_capability,
            )
        )
    return tuple(found)


def _read_driver(
    environ: Mapping[str, str], load_nvml: Callable[[], Any] | None, root: Path
) -> tuple[GpuReport, tuple[Device, ...]]:
    try:
        with driver_open(load_nvml):
            report = read_gpus(environ, load_nvml=load_nvml, root=root)
            return report, read_devices(environ, load_nvml=load_nvml) if report.gpus else ()
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
