"""Made-up hosts for preflight: all alike, but for what a test changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.machine.devices.choice import Device
from dsrun.launcher.machine.gpus.read import Gpu
from dsrun.launcher.machine.limits import LimitsReport
from dsrun.launcher.machine.memory import MemoryReport
from dsrun.launcher.machine.network.interfaces import RdmaDevice, RdmaPort
from dsrun.launcher.machine.software.versions import Versions
from dsrun.launcher.preflight.facts import HostFacts, JobGpu
from dsrun.launcher.preflight.file_facts import FileFacts
from dsrun.launcher.preflight.findings import AnsweredHost, Finding, Requirements
from dsrun.launcher.preflight.rules import judge

GIB = 1 << 30
CPU = Requirements(on_gpus=False)
GPU = Requirements(on_gpus=True)
_VERSIONS: dict[str, Any] = {
    **dict.fromkeys(Versions.__dataclass_fields__),
    "dsrun": "0.1.0",
    "python": "3.12.3",
    "python_path": "/opt/py/bin/python",
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "nccl": "2.28.3",
}
_MEMORY: dict[str, Any] = {
    **dict.fromkeys(MemoryReport.__dataclass_fields__),
    "total_bytes": 512 * GIB,
    "shm_total_bytes": 256 * GIB,
    "shm_free_bytes": 256 * GIB,
    "huge_pages": (),
}
_LIMITS: dict[str, Any] = {**dict.fromkeys(LimitsReport.__dataclass_fields__), "nofile": 65536, "nofile_hard": 65536}
#: Parts of `HostFacts` whose fields `a_host` takes by name.
_PARTS: dict[str, Any] = {"versions": Versions, "memory": MemoryReport, "limits": LimitsReport}
_FACTS = HostFacts(
    user="ada",
    kernel="6.8.0",
    glibc="glibc 2.39",
    place="",
    versions=Versions(**_VERSIONS),
    driver="580.65",
    driver_cuda="13.0",
    gpus=(),
    no_gpus="no NVIDIA driver",
    cores_usable=64,
    memory=MemoryReport(**_MEMORY),
    limits=LimitsReport(**_LIMITS),
    rdma=(),
    no_sockets=None,
    folder_fault=None,
    folder_free_bytes=900 * GIB,
    files={},
    code=None,
    paths=(),
    asked_s=0.0,
    answered_s=0.0,
)


def gpus(
    count: int,
    *,
    model: str = "H100",
    used_by: dict[int, str] | None = None,
    free: int = 79,
    free_of: dict[int, int] | None = None,
    capability: Sequence[str] | None = None,
) -> Any:
    """GPUs of 80 GiB; `used_by` says who is on which, `free` is in GiB, and `free_of` where it is not that."""
    return tuple(
        JobGpu(
            device=Device(
                name=f"GPU-{index}",
                label=f"GPU {index}",
                gpu=index,
                used_by=(used_by[index],) if used_by and index in used_by else (),
            ),
            gpu=Gpu(
                index=index,
                uuid=f"GPU-{index}",
                name=model,
                memory_total_bytes=80 * GIB,
                memory_free_bytes=(free if free_of is None else free_of.get(index, free)) * GIB,
                compute_capability=None if capability is None else capability[index],
                usable=True,
            ),
        )
        for index in range(count)
    )


def a_host(place: str, *, offset_s: float = 0.0, doubt_s: float = 0.001, **changes: Any) -> AnsweredHost:
    """A host that answered.

    Args:
        place: differs from machine to machine.
        offset_s: seconds by which the host's clock is off.
        doubt_s: uncertainty of the clock offset in seconds.
        changes: fields of `HostFacts`, or of its versions, memory and limits.
    """
    for part, kind in _PARTS.items():
        its = {name: changes.pop(name) for name in list(changes) if name in kind.__dataclass_fields__}
        changes[part] = dataclasses.replace(getattr(_FACTS, part), **its)
    facts = dataclasses.replace(_FACTS, **{"place": place, **changes})
    return AnsweredHost(facts=facts, clock_offset_s=offset_s, clock_doubt_s=doubt_s)


def rdma(*gid_index: int | None, kind: Any = "InfiniBand", rate: float = 400) -> dict[str, Any]:
    """RDMA cards with a working port each, one for each index; what NCCL takes follows from it."""
    layer = {"RoCE": "Ethernet", "EFA": "Unknown"}.get(kind, "InfiniBand")
    cards = tuple(
        RdmaDevice(
            name=f"mlx5_{number}",
            kind=kind,
            firmware=None,
            interface=None,
            pci_address=None,
            numa_node=None,
            ports=(
                RdmaPort(
                    number=1,
                    layer=layer,
                    state="ACTIVE",
                    physical="LinkUp",
                    rate_gbit=rate,
                    link_downed=None,
                    symbol_errors=None,
                    gid_index=index,
                    gid=None,
                ),
            ),
        )
        for number, index in enumerate(gid_index)
    )
    plugin = "/usr/lib/libnccl-net.so" if kind == "EFA" and cards else None
    return {"rdma": cards, "no_sockets": "mlx5_0 does RDMA" if cards else None, "net_plugin": plugin}


def script(*, digest: str | None = "9:aaaaaaaaaa", fault: str | None = None) -> dict[str, FileFacts]:
    """The files of a job that has a script only."""
    return {"script": FileFacts(path="/data/train.py", digest=digest, fault=fault)}


def cluster(count: int, odd: dict[str, dict[str, Any]] | None = None, **common: Any) -> dict[str, Any]:
    """Hosts n1, n2, ... that are alike, but for those in `odd`."""
    made: dict[str, Any] = {}
    for index in range(count):
        name = f"n{index + 1}"
        changes: dict[str, Any] = {"place": name, **common, **(odd or {}).get(name, {})}
        made[name] = a_host(**changes)
    return made


def specs(count: int, *, slots: int = 1, **fields: Any) -> list[HostSpec]:
    """Their lines in a hostfile."""
    return [
        HostSpec(name=f"n{index + 1}", slots=slots, source=f"hosts:{index + 1}", **fields) for index in range(count)
    ]


def judged(
    count: int,
    odd: dict[str, dict[str, Any]] | None = None,
    *,
    wants: Requirements = CPU,
    slots: int = 1,
    fields: dict[str, Any] | None = None,
    **common: Any,
) -> list[Finding]:
    """Judges hosts that are alike but for those in `odd`; `fields` are those of their lines in a hostfile."""
    found = judge(specs(count, slots=slots, **(fields or {})), cluster(count, odd, **common), wants)
    assert all(finding.fix and finding.hosts for finding in found)
    return found


def only(found: list[Finding]) -> tuple[str, str, str, tuple[str, ...]]:
    """The one finding there is: verdict, name, text, hosts."""
    (finding,) = found
    return finding.verdict, finding.name, finding.text, finding.hosts
