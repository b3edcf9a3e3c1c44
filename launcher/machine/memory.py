"""Memory of the machine and what of it a job may take: free, swap, huge pages, /dev/shm. Allocates nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.host.memory import parse_meminfo, read_host_memory

from .cgroup import CgroupLimits
from .known_fields import known_fields
from .pci import read_number
from .proc_files import read_text
from .storage import space_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePages:
    """Huge pages of one size that were set aside."""

    size_bytes: int
    total: int | None
    free: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory of the host in bytes; that of GPUs is left out where the kernel counts it (Grace).

    Attributes:
        usable_bytes: bytes that a job may take now, the smaller of free memory and the room below the cgroup limit;
            None where neither is known.
        huge_pages: set aside, by size; a size without any is left out.
        transparent_huge_pages: `always`, `madvise` or `never`.
    """

    total_bytes: int | None
    available_bytes: int | None
    cgroup_limit_bytes: int | None
    usable_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    huge_pages: tuple[HugePages, ...]
    transparent_huge_pages: str | None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MemoryReport:
        """Makes a report of its JSON form."""
        known = known_fields(cls, value)
        known["huge_pages"] = tuple(HugePages(**known_fields(HugePages, pages)) for pages in value["huge_pages"])
        return cls(**known)

    @property
    def limit_bytes(self) -> int | None:
        """Memory of the machine, or its cgroup's limit if that is less; None where neither is known."""
        sizes = [size for size in (self.total_bytes, self.cgroup_limit_bytes) if size is not None]
        return min(sizes, default=None)


def read_memory(root: Path, limits: CgroupLimits) -> MemoryReport:
    """Reads the memory.

    Args:
        root: `/`, or a made-up tree with proc/meminfo, sys/kernel/mm and dev/shm.
        limits: limits of this process's cgroups.
    """
    info = parse_meminfo(read_text(root / "proc/meminfo") or "")
    host = read_host_memory(root)
    available = host.available_bytes
    room = [value for value in (available, limits.memory_left_bytes) if value is not None]
    shm = space_of(root / "dev/shm")
    return MemoryReport(
        total_bytes=host.total_bytes,
        available_bytes=available,
        cgroup_limit_bytes=limits.memory_limit_bytes,
        usable_bytes=min(room, default=None),
        swap_total_bytes=info.get("SwapTotal"),
        swap_free_bytes=info.get("SwapFree"),
        shm_total_bytes=None if shm is None else shm[0],
        shm_free_bytes=None if shm is None else shm[1],
        huge_pages=_huge_pages(root / "sys/kernel/mm/hugepages"),
        transparent_huge_pages=chosen_word(read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""),
    )


def chosen_word(text: str) -> str | None:
    """Finds the word in brackets, with which the kernel marks a choice: `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", text)
    return None if match is None else match.group(1)


def _huge_pages(folder: Path) -> tuple[HugePages, ...]:
    found: list[HugePages] = []
    for part in folder.glob("hugepages-*kB"):
        size = part.name.removeprefix("hugepages-").removesuffix("kB")
        total = read_number(part / "nr_hugepages")
        if size.isdecimal() and total:
            found.append(HugePages(size_bytes=int(size) << 10, total=total, free=read_number(part / "free_hugepages")))
    return tuple(sorted(found, key=lambda pages: pages.size_bytes))
