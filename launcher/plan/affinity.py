"""Which cores each rank of a host runs on, and how many threads it starts. Pure: reads and sets nothing.

[Note: cores and threads] A *CPU* is what the kernel numbers: a hardware thread. A *core* is what computes: one CPU, or
several that share it (SMT). Shares are counted in cores, for two ranks on one core slow each other down. A rank that is
bound to a node may use all its CPUs (a core's second one still serves the data loader) but starts a thread a core only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .launch_plan import Bind

#: By how much the cores of NUMA nodes may differ before `auto` leaves ranks unbound: all wait for the slowest.
_EVEN_ENOUGH = 0.75
#: Part of an even share of all cores that a rank must find on its GPU's node for `auto` to bind it there.
_NEAR_ENOUGH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A CPU that this job may use. See [Note: cores and threads].

    Attributes:
        number: the kernel's.
        core: number of the lowest CPU of the same core, usable or not: names the core.
        package: socket.
        node: NUMA node.
    """

    number: int
    core: int
    package: int = 0
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where one rank runs.

    Attributes:
        cpus: the CPUs it may use, ascending; None leaves it as the host has it.
        threads: number of threads to compute with (OMP_NUM_THREADS), at least 1.
    """

    cpus: tuple[int, ...] | None
    threads: int


def bind_ranks(
    cpus: Sequence[Cpu],
    *,
    bind: Bind,
    gpu_nodes: Sequence[int | None],
    quota_cores: float | None = None,
    whole_sockets: bool = False,
) -> tuple[Binding, ...]:
    """Shares the cores of a host among its ranks; never fails, and the same values give the same shares.

    Args:
        cpus: those the job may use, in any order; at least one.
        bind: rule for the cores that each rank may run on, as the user asked for it; see `plan.Bind`.
        gpu_nodes: NUMA node of each local rank's GPU; None where it has none or the machine does not say.
        quota_cores: processor time a second that the control groups allow; None is no limit.
        whole_sockets: `auto` takes all nodes of a GPU's socket, not its node alone: for ranks that compute in host
            memory (an offloaded optimizer), whose speed is that of the memory channels they reach.

    Returns:
        one binding a local rank, in their order.
    """
    cores = _cores(cpus)
    ranks = len(gpu_nodes)
    match bind:
        case "none":
            sets = None
        case "auto":
            sets = _by_even_nodes(cores, gpu_nodes, whole_sockets=whole_sockets)
        case "numa":
            sets = _by_node(cores, _node_of_each(cores, gpu_nodes))
        case "cores":
            sets = _by_core(cores, gpu_nodes)
    allowed = None if quota_cores is None else int(quota_cores / ranks) if ranks else None
    if sets is None:
        return tuple(Binding(cpus=None, threads=_threads(len(cores), ranks, allowed)) for _ in range(ranks))
    core_of = {cpu.number: cpu.core for cpu in cpus}
    return tuple(
        Binding(cpus=own, threads=_threads(len({core_of[cpu] for cpu in own}), sets.count(own), allowed))
        for own in sets
    )


#: The usable CPUs of one core; cores in the order of package, node and number, so that neighbours are close.
_Core = tuple[Cpu, ...]


def _cores(cpus: Sequence[Cpu]) -> list[_Core]:
    by_core: dict[int, list[Cpu]] = {}
    for cpu in sorted(cpus, key=lambda cpu: (cpu.package, cpu.node, cpu.core, cpu.number)):
        by_core.setdefault(cpu.core, []).append(cpu)
    return [tuple(core) for core in by_core.values()]


def _threads(cores: int, sharers: int, allowed: int | None) -> int:
    share = cores // sharers
    return max(1, share if allowed is None else min(share, allowed))


def _by_even_nodes(
    cores: Sequence[_Core], gpu_nodes: Sequence[int | None], *, whole_sockets: bool
) -> list[tuple[int, ...]] | None:
    """Binds by node where that gains something for sure; None where it might take cores from a rank.

    With GPUs, their nodes must have cores enough: not one node of eight for the only rank, nor the two cores of a node
    that a cpuset has left for all. Without, every rank must get as much as the next: several ranks on each node, or
    several whole nodes for each.
    """
    nodes = _nodes(cores)
    if len(nodes) < 2:
        return None
    ranks = len(gpu_nodes)
    sizes = {node: sum(core[0].node == node for core in cores) for node in nodes}
    known = [node for node in gpu_nodes if node in sizes]
    if len(known) == ranks:
        near = [_socket_of(cores, node) if whole_sockets else [node] for node in known]
        least = min((sum(sizes[node] for node in its) / near.count(its) for its in near), default=0.0)
        return [_cpus_of(cores, its) for its in near] if least * ranks >= _NEAR_ENOUGH * len(cores) else None
    if ranks < 2 or min(sizes.values()) < _EVEN_ENOUGH * max(sizes.values()):
        return None
    if ranks % len(nodes) == 0:
        return _by_node(cores, _node_of_each(cores, [None] * ranks))
    if len(nodes) % ranks == 0:
        each = len(nodes) // ranks
        return [_cpus_of(cores, nodes[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    return None


def _by_node(cores: Sequence[_Core], node_of_rank: Sequence[int]) -> list[tuple[int, ...]]:
    return [_cpus_of(cores, [node]) for node in node_of_rank]


def _node_of_each(cores: Sequence[_Core], gpu_nodes: Sequence[int | None]) -> list[int]:
    """Returns the node of each rank: its GPU's, else ranks are dealt out over the nodes in blocks."""
    nodes = _nodes(cores)
    dealt = [nodes[rank * len(nodes) // len(gpu_nodes)] for rank in range(len(gpu_nodes))]
    return [near if near in nodes else other for near, other in zip(gpu_nodes, dealt, strict=True)]


def _by_core(cores: Sequence[_Core], gpu_nodes: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Gives each rank cores of its own, one CPU of each; CPUs where there are fewer cores than ranks."""
    ranks = len(gpu_nodes)
    if ranks > len(cores):
        return _shares([cpu.number for core in cores for cpu in core], ranks)
    first_cpus = [core[0] for core in cores]
    near = {node: [rank for rank in range(ranks) if gpu_nodes[rank] == node] for node in _nodes(cores)}
    own = {node: [cpu.number for cpu in first_cpus if cpu.node == node] for node in near}
    if sum(map(len, near.values())) == ranks and all(len(near[node]) <= len(own[node]) for node in near):
        placed = {
            rank: share
            for node in near
            for rank, share in zip(near[node], _shares(own[node], len(near[node])), strict=True)
        }
    else:
        # A node has fewer cores than ranks, or a GPU's node is unknown: as near as a cut into equal parts comes.
        order = sorted(range(ranks), key=lambda rank: _position(near, gpu_nodes[rank]))
        placed = dict(zip(order, _shares([cpu.number for cpu in first_cpus], ranks), strict=True))
    return [placed[rank] for rank in range(ranks)]


def _position(near: dict[int, list[int]], node: int | None) -> int:
    return list(near).index(node) if node in near else len(near)


def _shares(numbers: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Cuts a list into contiguous parts whose sizes differ by one at most; parts overlap only where it is too short."""
    total = len(numbers)
    starts = [rank * total // ranks for rank in range(ranks)]
    ends = [max(start + 1, (rank + 1) * total // ranks) for rank, start in enumerate(starts)]
    return [tuple(sorted(numbers[start:end])) for start, end in zip(starts, ends, strict=True)]


def _nodes(cores: Sequence[_Core]) -> list[int]:
    """Returns the nodes that have a usable core, in the order of the cores."""
    return list(dict.fromkeys(core[0].node for core in cores))


def _socket_of(cores: Sequence[_Core], node: int) -> list[int]:
    """Returns the nodes of a node's socket: firmware cuts one into as many as four (NPS4, SNC4)."""
    sockets = {core[0].package for core in cores if core[0].node == node}
    return [other for other in _nodes(cores) if any(c[0].package in sockets for c in cores if c[0].node == other)]


def _cpus_of(cores: Sequence[_Core], nodes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(cpu.number for core in cores if core[0].node in nodes for cpu in core))
