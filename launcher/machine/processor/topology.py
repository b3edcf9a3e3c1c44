"""The CPUs of this machine as /sys tells them: core, socket and NUMA node of each. Decides nothing; never fails.

What a kernel, a container or a board leaves out is filled in so that ranks can still be bound: a CPU without a topology
(offline, masked, old ARM kernels) is a core of its own, one in no node belongs to node 0.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ...plan.affinity import Cpu
from ..proc_files import read_text

#: No kernel is built for more CPUs or nodes; a longer list is nonsense, and would be worth gigabytes.
_MOST = 1 << 16


def read_cpus(root: Path, *, allowed: Collection[int]) -> tuple[Cpu, ...]:
    """Reads the CPUs that a job may use.

    Args:
        root: `/`, or a made-up tree with sys/devices/system.
        allowed: CPUs this process may be scheduled on; the kernel lists only those that are online.
    """
    system = root / "sys/devices/system"
    node_of = _nodes(system / "node")
    return tuple(_read_cpu(system / f"cpu/cpu{number}/topology", number, node_of) for number in sorted(allowed))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Reads the kernel's list format, `0-3,8,10-11`; what is no number or range is left out."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            numbers.update(range(int(first), min(int(last or first), _MOST) + 1))
    return tuple(sorted(numbers))


def _read_cpu(folder: Path, number: int, node_of: dict[int, int]) -> Cpu:
    # `core_cpus_list` is the newer name (Linux 5.3) of the same list.
    siblings = read_text(folder / "core_cpus_list") or read_text(folder / "thread_siblings_list") or ""
    package = (read_text(folder / "physical_package_id") or "").strip()
    return Cpu(
        number=number,
        core=min((number, *parse_cpu_list(siblings))),
        # Virtual machines and ARM boards may say -1.
        package=int(package) if package.isdecimal() else 0,
        node=node_of.get(number, 0),
    )


def _nodes(folder: Path) -> dict[int, int]:
    """Returns CPU -> node. Nodes with memory alone (CXL, a GPU's memory on Grace) have an empty list and drop out."""
    online = read_text(folder / "online")
    nodes = parse_cpu_list("0" if online is None else online)
    return {cpu: node for node in nodes for cpu in parse_cpu_list(read_text(folder / f"node{node}/cpulist") or "")}
