"""Where a job's ranks go: hostfile, scheduler's job or this machine -> hosts, those that are this one, the way there.

Reads the hostfile, the environment and the list of a scheduler, contacts nobody. Which slots are taken stands in
selection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsrun.errors import HostfileError, Problem, UsageError

from ..hosts.hostfile import read_hostfile
from ..hosts.spec import Allocation, HostSpec
from ..plan.selection import is_local, select, select_local
from ..scheduler import slurm
from ..scheduler.registry import SchedulerJob, find_job
from ..transport.choice import TransportName

#: For the other nodes to be started, by people or by a scheduler with a queue of its own.
NODES_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticNode:
    """This machine as one of several, on each of which somebody starts dsrun.

    Attributes:
        node_rank: its place among them.
        node_count: number of nodes, which all have the same number of ranks.
        master_addr: address of the first one, which all others reach.
        master_port: port on the first node at which the ranks meet.
        interface: network interface of this machine that ranks use to talk; None leaves the choice to them.
        patience_s: seconds to wait for all other nodes to be there.
    """

    node_rank: int
    node_count: int
    master_addr: str
    master_port: int
    interface: str | None = None
    patience_s: float = NODES_PATIENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """What the user said about hosts.

    Attributes:
        hostfile: None means those of the scheduler's job around this process, or this machine.
        include: filter of what to take.
        exclude: filter of what to leave.
        nodes: number of hosts to take, the first of them; None takes all.
        ranks_per_host: None means as many as there are slots, or GPUs.
        transport: the way to hosts that are not this machine; None leaves the choice to where they come from.
        ssh_port: port of the ssh server on hosts that name none; None means the one that ssh itself would use.
        static: place of this machine among several nodes, where it starts its own ranks alone; None otherwise. It
            excludes options that name other hosts.
    """

    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    nodes: int | None = None
    ranks_per_host: int | None = None
    transport: TransportName | None = None
    ssh_port: int | None = None
    static: StaticNode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the ranks go.

    Attributes:
        allocation: hosts in rank order.
        local_hosts: names of the hosts that are this machine; their ranks are started without a connection.
        transport: the way to the others; `local` where there are none.
        static: set where others start the ranks of further hosts, which the allocation has not.
        source: name of the scheduler's job that gave the hosts, `PBS job 123`; empty where the user named them, or for
            this machine.
        remarks: remarks that users must know about the choice.
        slots_from_scheduler: the user has not said how many ranks a host takes, nor which slots.
    """

    allocation: Allocation
    local_hosts: frozenset[str]
    transport: TransportName
    static: StaticNode | None = None
    source: str = ""
    remarks: tuple[str, ...] = ()
    slots_from_scheduler: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the job, those that others start too."""
        return self.allocation.world_size * (1 if self.static is None else self.static.node_count)

    @property
    def remote_hosts(self) -> tuple[HostSpec, ...]:
        """The hosts that are reached over the transport."""
        return tuple(host for host in self.allocation.hosts if host.name not in self.local_hosts)


def place(
    request: HostRequest,
    *,
    environ: Mapping[str, str],
    local_names: Collection[str],
    device_count: Callable[[], int],
) -> Placement:
    """Chooses hosts and slots, and how the hosts are reached.

    Args:
        request: request for hosts: which ones, how many, and the way to them.
        environ: environment variables, in which a scheduler's job shows.
        local_names: names of this machine, in lower case, besides `localhost` and its like.
        device_count: function that counts the usable GPUs of this machine; called only for this machine alone, or where
            its count gives a scheduler's hosts their slots.

    Raises:
        HostfileError: carries every problem of hostfile, filters and counts.
        UsageError: the transport needs a Slurm job and there is none.
    """
    if request.transport == "srun" and slurm.job_id(environ) is None:
        raise UsageError(
            "`--transport srun` needs a Slurm job, and this process runs in none",
            hint="`salloc` or `sbatch` makes one; `--transport ssh` needs none",
        )
    if request.static is not None:
        return replace(_here(replace(request, nodes=None), device_count()), static=request.static)
    if request.hostfile is not None:
        slots = request.ranks_per_host
        hosts = read_hostfile(Path(request.hostfile), slots=slots if slots and slots > 0 else None)
        return _placed(_select(hosts, request), request, usual="ssh", local_names=frozenset(local_names))
    job = find_job(environ, local_names=local_names)
    if job is None:
        return _here(request, device_count())
    if not job.hosts:
        return replace(_here(request, device_count()), remarks=() if job.remark is None else (job.remark,))
    return _in_job(job, request, environ=environ, local_names=local_names, device_count=device_count)


def _in_job(
    job: SchedulerJob,
    request: HostRequest,
    *,
    environ: Mapping[str, str],
    local_names: Collection[str],
    device_count: Callable[[], int],
) -> Placement:
    """Takes the hosts of a scheduler's job, with `-n` or the GPUs of a host for the slots of each."""
    hosts, remarks = job.hosts, [] if job.remark is None else [job.remark]
    names = frozenset({*local_names, *(() if job.here is None else (job.here.lower(),))})
    if request.ranks_per_host is not None:
        # What a scheduler itself says is a guess where it counts no GPUs.
        hosts = _with_slots(hosts, request.ranks_per_host)
    elif not job.counts_gpus and job.here is not None and (count := device_count()):
        hosts = _with_slots(hosts, count)
        visible = environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible and visible != ",".join(map(str, range(count))):
            remarks.append(
                f"{job.name} names its GPUs on this host alone (CUDA_VISIBLE_DEVICES={visible[:80]}): ranks of the "
                f"other hosts take the first {count} that they see there; `-H FILE` with `gpus=` chooses others"
            )
    elif not job.counts_gpus and job.here is None:
        remarks.append(f"{job.name} does not say how many GPUs a host has: a rank takes each slot; `-n N` gives each N")
    placed = _placed(_select(hosts, request), request, usual=job.way, local_names=names)
    is_unasked = request.ranks_per_host is None and request.include is None and request.exclude is None
    return replace(placed, source=job.name, remarks=tuple(remarks), slots_from_scheduler=is_unasked)


def _select(hosts: tuple[HostSpec, ...], request: HostRequest) -> Allocation:
    return select(
        hosts,
        include=request.include,
        exclude=request.exclude,
        nodes=request.nodes,
        ranks_per_host=request.ranks_per_host,
    )


def _with_slots(hosts: tuple[HostSpec, ...], slots: int) -> tuple[HostSpec, ...]:
    return tuple(replace(host, slots=slots) for host in hosts)


def _here(request: HostRequest, device_count: int) -> Placement:
    allocation = select_local(
        ranks_per_host=request.ranks_per_host,
        device_count=device_count,
        include=request.include,
        exclude=request.exclude,
        nodes=request.nodes,
    )
    return Placement(
        allocation=allocation, local_hosts=frozenset(host.name for host in allocation.hosts), transport="local"
    )


def _placed(
    allocation: Allocation, request: HostRequest, *, usual: TransportName, local_names: frozenset[str]
) -> Placement:
    transport = request.transport or usual
    hosts = tuple(_with_port(host, request.ssh_port) for host in allocation.hosts)
    if transport == "local":
        here = list(hosts)
    else:
        here = [host for host in hosts if _is_here(host, local_names)]
        _refuse_twins(here)
        if transport == "srun" and len(hosts) > 1:
            # Slurm gives a step its part of a host; the batch script, which may run on one of them, is another step.
            here = []
    names = frozenset(host.name for host in here)
    return Placement(
        allocation=Allocation(hosts=hosts),
        local_hosts=names,
        transport="local" if len(names) == len(hosts) else transport,
    )


def _with_port(host: HostSpec, port: int | None) -> HostSpec:
    return host if host.port is not None or port is None else replace(host, port=port)


def _is_here(host: HostSpec, local_names: frozenset[str]) -> bool:
    """By name alone: with a user, a port or an address it may be a container, or a tunnel to somewhere else."""
    is_elsewhere = host.user is not None or host.port is not None or host.addr is not None
    return not is_elsewhere and is_local(host.name, local_names=local_names)


def _refuse_twins(here: list[HostSpec]) -> None:
    if len(here) > 1:
        first = here[0]
        raise HostfileError.of(
            [
                Problem(
                    f"{host.source}: `{host.name}` is this machine, as is `{first.name}` ({first.source})",
                    "give each host one line and add up the slots",
                )
                for host in here[1:]
            ]
        )
