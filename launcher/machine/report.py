"""The report of `dsrun probe` as a value, and its one JSON form. Looks at nothing: `read.py` fills it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .cgroup import CgroupReport
from .devices.unusable import UnusableGpus
from .gpus.left_out import LeftOut
from .gpus.read import Gpu
from .host import HostReport
from .memory import MemoryReport
from .network.interfaces import NetworkReport, RdmaDevice
from .processor.model import CpuReport
from .processor.numa import NumaNode, RankBinding
from .provenance import SOURCES
from .software.loaded_libraries import LoadedLibraries
from .software.versions import Software, Versions
from .storage import StorageReport
from .topology import Topology
from .verdict import ProbeVerdict

#: Raised whenever a field changes its meaning or goes away; new fields do not raise it.
#: 2: `network` lists cards that are down too.
SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """The filesystem of the working folder (links resolved); `free_bytes` is what an ordinary user may still write."""

    path: str | None
    filesystem: str | None
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Everything `dsrun probe` tells.

    Attributes:
        binding: cores that each local rank would run on, one entry for each GPU a job sees; empty without GPUs.
        gpus_usable: devices a job sees: CUDA_VISIBLE_DEVICES applied, a MIG slice counted as one.
        gpus_left_out: GPUs that the driver counts and no job can use.
        gpus_unlisted: GPUs that this process was given and the driver does not count: it could not start them.
        gpus_idle: sentence about GPUs that this process was not given; None without any.
        gpus_unusable: reason why no GPU can be used where there should be some, with a fix; None where that is not so.
        driver: version of the NVIDIA driver.
        driver_cuda: newest CUDA version the driver can run.
        nccl_net_plugin: path of the library by which NCCL takes other networks than InfiniBand and sockets.
        nccl_verbs: path of the one by which it takes InfiniBand and RoCE.
        loaded: versions and devices that torch, CUDA and NCCL tell of once they are loaded; None unless asked for.
        measured: results of benchmarks, by the benchmark's name; empty unless asked for.
        verdicts: verdicts on what is wrong, the worst first, each with a way out.
        null_reasons: dotted path of a value that is None -> why.
    """

    host: HostReport
    cpu: CpuReport
    memory: MemoryReport
    cgroup_version: str | None
    cgroup: CgroupReport
    numa: tuple[NumaNode, ...]
    binding: tuple[RankBinding, ...]
    gpus: tuple[Gpu, ...]
    gpus_usable: int
    driver: str | None
    driver_cuda: str | None
    topology: Topology
    disk: DiskReport
    storage: StorageReport
    network: tuple[NetworkReport, ...]
    rdma: tuple[RdmaDevice, ...]
    nccl_interface: str | None
    gloo_interface: str | None
    nccl_net_plugin: str | None
    versions: Versions
    software: Software
    gpus_left_out: tuple[LeftOut, ...] = ()
    gpus_unlisted: int = 0
    gpus_idle: str | None = None
    gpus_unusable: UnusableGpus | None = None
    nccl_verbs: str | None = None
    loaded: LoadedLibraries | None = None
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])
    verdicts: tuple[ProbeVerdict, ...] = ()
    null_reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> dict[str, Any]:
        """Returns what json.loads returns of it: the version of the schema first, the sources of values last."""
        return {"schema_version": SCHEMA_VERSION, **_plain(asdict(self)), "sources": dict(SOURCES)}


def _plain(value: Any) -> Any:
    """Makes lists of tuples, as other hosts send them."""
    if isinstance(value, dict):
        items: dict[str, Any] = value
        return {key: _plain(item) for key, item in items.items()}
    if isinstance(value, list | tuple):
        parts: Sequence[Any] = value
        return [_plain(item) for item in parts]
    return value
