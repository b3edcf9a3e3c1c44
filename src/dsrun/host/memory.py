"""Memory of the host: what the kernel counts, less what of it is memory of GPUs. Reads files; allocates nothing.

[Note: memory of GPUs] On Grace the kernel makes a GPU's memory a NUMA node without CPUs, and counts it in MemTotal and
MemAvailable. NVML tells of the same memory: it would be counted twice, and offloaded state would land where
it came from. Nodes without CPUs on x86 are memory of the host (CXL, HBM of a Xeon): no GPU there has a node.
Source: NVIDIA Grace Performance Tuning Guide; Documentation/admin-guide/mm/numaperf.rst of Linux.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the host in bytes; None where the kernel does not tell it.

    Attributes:
        total_bytes: all of it.
        available_bytes: bytes that can be taken without swapping; None where the kernel does not tell.
        of_gpus_bytes: bytes of GPU memory that the kernel counts as host memory and the other fields leave out; see
            [Note: memory of GPUs].
    """

    total_bytes: int | None
    available_bytes: int | None
    of_gpus_bytes: int


def read_host_memory(root: Path = _ROOT) -> HostMemory:
    """Reads the memory of this host.

    Args:
        root: `/`, or a made-up tree with proc/meminfo and sys/devices/system/node.
    """
    info = parse_meminfo(_text(root / "proc/meminfo"))
    of_gpus = list(_nodes_of_gpus(root))
    # Page cache there may be dropped, and what is free then is the GPU's all the same.
    spare = sum(node.get("MemFree", 0) + node.get("FilePages", 0) for node in of_gpus)
    of_gpus_bytes = sum(node.get("MemTotal", 0) for node in of_gpus)
    return HostMemory(
        total_bytes=_less(info.get("MemTotal"), of_gpus_bytes),
        available_bytes=_less(info.get("MemAvailable"), spare),
        of_gpus_bytes=of_gpus_bytes,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Reads /proc/meminfo, or the meminfo of a NUMA node, whose lines begin with its name: name -> bytes."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            values[name.split()[-1]] = int(words[0]) * 1024
    return values


def _nodes_of_gpus(root: Path) -> Iterator[dict[str, int]]:
    """Gives what the kernel tells of each node that is the memory of a GPU."""
    nodes = root / "sys/devices/system/node"
    if not os.path.exists(root / "sys/module/nvidia") or _is_x86(root):
        return
    for node in nodes.glob("node[0-9]*"):
        if not _text(node / "cpulist").strip():
            yield parse_meminfo(_text(node / "meminfo"))


def _is_x86(root: Path) -> bool:
    # Hundreds of processors say the same: the first is enough.
    return "\nflags" in _text(root / "proc/cpuinfo").partition("\n\n")[0]


def _less(value: int | None, part: int) -> int | None:
    return None if value is None else max(0, value - part)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
