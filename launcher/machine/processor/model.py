"""The processor: sockets, cores, caches, instruction sets, and how much of it this process may use."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..proc_files import CpuInfo, is_there, read_text, usable_cores
from .topology import parse_cpu_list, read_cpus

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """A cache as the first CPU sees it; `shared_by` CPUs use it together."""

    level: int
    kind: str | None
    size_bytes: int | None
    shared_by: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReport:
    """The processor.

    Attributes:
        model: its name.
        sockets: packages on the board.
        cores: physical ones of the machine.
        threads_per_core: 2 with hyper-threading.
        cores_present: logical processors that are online.
        cores_in_affinity: those this process may be scheduled on (cpusets included).
        quota_cores: processor time a second that its cgroups allow, in cores.
        cores_usable: number of cores that a job can keep busy, after affinity and quota; at least 1.
        isa: instruction sets of note.
        caches: caches of the first CPU, lowest level first.
        governor: governor by which clocks are chosen, `performance` or `powersave`, or several where CPUs differ; None
            where it cannot be read.
        frequency_driver: `intel_pstate` and `amd-pstate-epp` clock up under load whatever the governor is called.
    """

    model: str | None
    sockets: int | None
    cores: int | None
    threads_per_core: int | None
    cores_present: int
    cores_in_affinity: int
    quota_cores: float | None
    cores_usable: int
    isa: tuple[str, ...]
    caches: tuple[CacheReport, ...]
    governor: str | None
    frequency_driver: str | None


def read_cpu(root: Path, info: CpuInfo, *, affinity: Collection[int], quota_cores: float | None) -> CpuReport:
    """Reads the processor.

    Args:
        root: `/`, or a made-up tree with sys/devices/system/cpu.
        info: values that were read from /proc/cpuinfo.
        affinity: logical processors this process may run on.
        quota_cores: processor time a second that the process's cgroups allow, in cores; None for no limit.
    """
    system = root / "sys/devices/system/cpu"
    online = parse_cpu_list(read_text(system / "online") or "")
    cpus = read_cpus(root, allowed=online) if is_there(system / "cpu0/topology") else ()
    cores = len({(cpu.package, cpu.core) for cpu in cpus}) or None
    return CpuReport(
        model=info.model,
        sockets=len({cpu.package for cpu in cpus}) or None,
        cores=cores,
        threads_per_core=None if cores is None else len(cpus) // cores,
        cores_present=info.cores or len(online) or os.cpu_count() or 1,
        cores_in_affinity=len(affinity),
        quota_cores=quota_cores,
        cores_usable=usable_cores(affinity, quota_cores),
        isa=info.isa,
        caches=_caches(system / "cpu0/cache"),
        governor=_words(system / "cpufreq", "scaling_governor"),
        frequency_driver=_words(system / "cpufreq", "scaling_driver"),
    )


def parse_size(text: str) -> int | None:
    """Reads a size as the kernel writes it: `2048K`."""
    text = text.strip()
    unit = _UNITS.get(text[-1:])
    digits = text if unit is None else text[:-1]
    return int(digits) * (unit or 1) if digits.isdecimal() else None


def _caches(folder: Path) -> tuple[CacheReport, ...]:
    found: list[CacheReport] = []
    for part in folder.glob("index[0-9]*"):
        level = (read_text(part / "level") or "").strip()
        if level.isdecimal():
            shared = parse_cpu_list(read_text(part / "shared_cpu_list") or "")
            found.append(
                CacheReport(
                    level=int(level),
                    kind=(read_text(part / "type") or "").strip().lower() or None,
                    size_bytes=parse_size(read_text(part / "size") or ""),
                    shared_by=len(shared) or None,
                )
            )
    return tuple(sorted(found, key=lambda cache: (cache.level, cache.kind or "")))


def _words(folder: Path, name: str) -> str | None:
    """Reads a word of every policy, of which there is one a core or a socket: fewer than CPUs."""
    texts = (read_text(part / name) for part in folder.glob("policy*"))
    return ", ".join(sorted({text.strip() for text in texts if text})) or None
