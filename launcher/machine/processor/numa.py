"""The NUMA nodes of the machine, what is wired to each, and where ranks would run for it. Binds nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.host.memory import parse_meminfo

from ...plan.affinity import bind_ranks
from ..devices.by_rank import gpus_of_ranks
from ..gpus.read import Gpu, GpuReport
from ..network.interfaces import NetworkReport, RdmaDevice
from ..proc_files import read_text
from ..storage import NvmeDrive
from .topology import parse_cpu_list, read_cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One node.

    Attributes:
        node: its number.
        cpus: its CPUs as the kernel lists them, `0-55,112-167`; empty for a node of memory alone.
        cpus_usable: number of the node's CPUs that this process may be scheduled on.
        memory_total_bytes: memory of the node.
        memory_free_bytes: free memory of the node; page cache does not count as free here.
        distances: distances to every node; 10 is the distance to itself.
        gpus: indices of GPUs wired to it.
        nics: network cards wired to it, by the names RDMA and the kernel give them.
        nvme: drives wired to it.
    """

    node: int
    cpus: str
    cpus_usable: int
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    distances: tuple[int, ...]
    gpus: tuple[int, ...]
    nics: tuple[str, ...]
    nvme: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBinding:
    """Where `dsrun run` puts a rank if there is one for each GPU a job sees.

    Attributes:
        local_rank: the rank.
        gpu: index of its GPU, or of the one that its MIG slice is of.
        cpus: the CPUs it is bound to, as the kernel lists them and `taskset -c` takes them; None if it is not bound.
        threads: number of threads for the rank, which OMP_NUM_THREADS would say.
    """

    local_rank: int
    gpu: int
    cpus: str | None
    threads: int


def read_binding(
    root: Path, environ: Mapping[str, str], *, affinity: Collection[int], report: GpuReport, quota_cores: float | None
) -> tuple[RankBinding, ...]:
    """Works out where ranks would run, by the rule of `dsrun run --bind auto`.

    Args:
        root: `/`, or a made-up tree.
        environ: environment variables that ranks inherit.
        affinity: logical processors this process may run on.
        report: the GPUs of this machine.
        quota_cores: processor time a second that cgroups allow.
    """
    if not report.usable_count:
        return ()
    gpu_of = dict(zip(report.places, (gpu for gpu in report.gpus if not gpu.lost), strict=True))
    used = gpus_of_ranks(report.places, [environ] * report.usable_count)
    gpus = [None if place is None else gpu_of[place] for place in used]
    nodes = [None if gpu is None else gpu.numa_node for gpu in gpus]
    bound = bind_ranks(read_cpus(root, allowed=affinity), bind="auto", gpu_nodes=nodes, quota_cores=quota_cores)
    return tuple(
        RankBinding(
            local_rank=rank,
            gpu=gpu.index,
            cpus=None if binding.cpus is None else cpu_list(binding.cpus),
            threads=binding.threads,
        )
        for rank, (gpu, binding) in enumerate(zip(gpus, bound, strict=True))
        if gpu is not None
    )


def cpu_list(numbers: Iterable[int]) -> str:
    """Writes CPUs as the kernel does: `0-3,8,10-11`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def node_cpus(root: Path) -> dict[int, str]:
    """Returns the CPUs of every node, as the kernel lists them.

    Args:
        root: `/`, or a made-up tree with sys/devices/system/node.
    """
    folder = root / "sys/devices/system/node"
    nodes = parse_cpu_list(read_text(folder / "online") or "")
    return {node: (read_text(folder / f"node{node}/cpulist") or "").strip() for node in nodes}


def read_numa(
    root: Path,
    cpus: dict[int, str],
    *,
    affinity: Collection[int],
    gpus: Sequence[Gpu],
    network: Sequence[NetworkReport],
    rdma: Sequence[RdmaDevice],
    nvme: Sequence[NvmeDrive],
) -> tuple[NumaNode, ...]:
    """Puts the map together.

    Args:
        root: `/`, or a made-up tree.
        cpus: CPUs of every node, by its number, as the kernel lists them.
        affinity: logical processors this process may run on.
        gpus: GPUs of this machine.
        network: interfaces; those of an RDMA card are left out, for the card is named.
        rdma: InfiniBand and RoCE cards.
        nvme: drives.
    """
    allowed = set(affinity)
    ours = {card.interface for card in rdma}
    cards = [(card.name, card.numa_node) for card in rdma]
    cards += [(link.interface, link.numa_node) for link in network if link.interface not in ours]
    nodes: list[NumaNode] = []
    for node, listed in cpus.items():
        folder = root / f"sys/devices/system/node/node{node}"
        memory = parse_meminfo(read_text(folder / "meminfo") or "")
        distances = (read_text(folder / "distance") or "").split()
        nodes.append(
            NumaNode(
                node=node,
                cpus=listed,
                cpus_usable=len(allowed.intersection(parse_cpu_list(listed))),
                memory_total_bytes=memory.get("MemTotal"),
                memory_free_bytes=memory.get("MemFree"),
                distances=tuple(int(word) for word in distances if word.isdecimal()),
                gpus=tuple(gpu.index for gpu in gpus if gpu.numa_node == node),
                nics=tuple(name for name, where in cards if where == node),
                nvme=tuple(drive.name for drive in nvme if drive.numa_node == node),
            )
        )
    return tuple(nodes)
