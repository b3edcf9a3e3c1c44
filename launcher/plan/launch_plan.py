"""The launch as a value: what runs where, as which rank, with which environment.

Pure: the same allocation and command give the same plan. `--dry-run` prints it, agents receive it, tests compare it.
The port of the rendezvous is no part of it, for it exists only once the first host holds the socket.

[Note: variables] What a rank gets, later ones over earlier ones: what dsrun found out about its host (`NodePlan.env`),
the environment its agent was started in, the plan's variables, those the hostfile gives its host, the rank's own
(devices, threads), and last what says who it is. So dsrun's own findings fill in only what nobody has set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dsrun.contract.environment import RankInfo

from ..hosts.spec import Allocation, HostSpec

#: `script`: a Python file; `module`: `python -m`; `command`: any program, argv as it stands.
ProgramKind = Literal["script", "module", "command"]
#: `fork`: import torch once a host and fork the ranks; `exec`: a fresh interpreter or program for each.
StartMethod = Literal["fork", "exec"]
#: `auto`: by NUMA node where there are several, else nothing; `cores`: whole cores of its own for each rank; `numa`:
#: the cores of the rank's NUMA node, shared with the ranks of that node; `none`: what the host allows.
Bind = Literal["auto", "none", "cores", "numa"]
#: Longest silence between front end and agent, in seconds, before each takes the other for lost.
DEFAULT_LEASE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every rank runs.

    Attributes:
        kind: kind of program that `target` names: `script`, `module` or `command`.
        target: path of the script, name of the module, or the command's first word.
        args: the words after it, byte for byte as the user gave them (undecodable bytes as surrogate escapes).
        python: the interpreter for scripts and modules on the front end's host; elsewhere it is the agent's own.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...]
    python: str

    def words(self) -> list[str]:
        """Returns the command as one would type it."""
        head = {"script": [self.python, "-u"], "module": [self.python, "-u", "-m"], "command": []}[self.kind]
        return [*head, self.target, *self.args]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One rank of the job on one host.

    Attributes:
        rank: global rank.
        local_rank: rank within the host.
        env: variables for this rank alone. See [Note: variables].
    """

    rank: int
    local_rank: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlace:
    """Where a GPU of a host is, by the word of its driver. JSON values of its fields make an equal one.

    Attributes:
        uuid: GPU's UUID, by which CUDA_VISIBLE_DEVICES may name it; None where the driver does not tell it.
        address: GPU's PCI address as /sys writes it, `0000:1b:00.0`; None where the driver does not tell it.
        model: GPU's product name; None where the driver does not tell it.
        slices: names of the GPU's MIG slices; None where it is not in MIG mode.
    """

    uuid: str | None
    address: str | None
    model: str | None = None
    slices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.slices is not None:
            object.__setattr__(self, "slices", tuple(self.slices))  # JSON has lists only


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The workers of one host.

    Attributes:
        node_rank: its place among the hosts of the plan.
        host: host as the user described it; its `env` is for all its workers.
        workers: workers of the host, in rank order.
        env: variables that dsrun found out about the host, such as its network interface. See [Note: variables].
        gpus: its GPUs that ranks may reach, in CUDA's order by PCI address; empty where its driver was not asked.
        chosen: GPUs that its ranks take, as places among those that a process there sees; None leaves them as they are.
    """

    node_rank: int
    host: HostSpec
    workers: tuple[WorkerSpec, ...]
    env: dict[str, str] = field(default_factory=dict[str, str])
    gpus: tuple[GpuPlace, ...] = ()
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The hosts of a job that each have a dsrun of their own, started by somebody else: a pod or a terminal each.

    The plan then has this host alone, as one of `node_count` that have equally many ranks; ranks and hosts are numbered
    over all of them. They find together at the plan's `master_addr` before the first rank starts, see
    `rendezvous/static_nodes.py`.

    Attributes:
        node_rank: rank of this host among all hosts of the job.
        node_count: all hosts, this one too.
        port: port of the rendezvous on node 0, the same for all hosts.
        patience_s: seconds that hosts wait for each other.
    """

    node_rank: int
    node_count: int
    port: int
    patience_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A whole launch.

    Attributes:
        job_id: id of the job, which is in the environment of each of its processes.
        program: program that each rank runs.
        start: way to start ranks: `fork` or `exec`.
        cwd: working folder of every rank.
        env: variables all ranks get. See [Note: variables].
        run_dir: folder of this job's logs, records and error files.
        grace_s: seconds between asking all ranks to end and killing them.
        nodes: hosts in rank order.
        nonce: secret word that only this job's ranks and store know; another for each attempt.
        master_addr: address on the first host that all hosts can reach; the rendezvous store listens there alone.
        bind: rule for the cores that each rank may run on; hosts apply it, for only they know their cores.
        lease_s: longest silence between front end and agent.
        attempt: number of earlier starts of the job; 0 at the first start.
        max_restarts: number of times that the job may be started again.
        resume: folder of the checkpoint to go on from; None at the first start, or where there is none.
        stdin_rank: the rank that gets dsrun's own stdin; None where all find an empty one.
        outside: the job's other hosts, where they have a dsrun of their own; None where `nodes` are all.
        steps_on_host: the optimizer's step computes in host memory; see `affinity.bind_ranks`.
    """

    job_id: str
    program: Program
    start: StartMethod
    cwd: str
    env: dict[str, str]
    run_dir: str
    grace_s: float
    nodes: tuple[NodePlan, ...]
    nonce: str
    master_addr: str = "127.0.0.1"
    bind: Bind = "auto"
    lease_s: float = DEFAULT_LEASE_S
    attempt: int = 0
    max_restarts: int = 0
    resume: str | None = None
    stdin_rank: int | None = None
    outside: Outside | None = None
    steps_on_host: bool = False

    @property
    def ranks(self) -> range:
        """The ranks that this dsrun starts: all, unless there are hosts outside."""
        first = self.nodes[0].workers[0].rank
        return range(first, first + sum(len(node.workers) for node in self.nodes))

    @property
    def world_size(self) -> int:
        """Ranks over all hosts, those outside too."""
        return len(self.ranks) * (1 if self.outside is None else self.outside.node_count)

    @property
    def rank_hosts(self) -> list[str]:
        """Name of each rank's host, by rank; `elsewhere` for those outside."""
        names = ["elsewhere"] * self.world_size
        for node in self.nodes:
            for worker in node.workers:
                names[worker.rank] = node.host.name
        return names

    def rank_info(self, worker: WorkerSpec, node: NodePlan, *, address: str, port: int, agent_store: bool) -> RankInfo:
        """Completes a worker's place in the job once the rendezvous is known."""
        return RankInfo(
            rank=worker.rank,
            world_size=self.world_size,
            local_rank=worker.local_rank,
            local_world_size=len(node.workers),
            node_rank=node.node_rank if self.outside is None else self.outside.node_rank,
            node_count=len(self.nodes) if self.outside is None else self.outside.node_count,
            master_addr=address,
            master_port=port,
            agent_store=agent_store,
        )

    def at(self, address: str, env_of: Mapping[str, Mapping[str, str]]) -> LaunchPlan:
        """Returns the plan with what was found out about its hosts.

        Args:
            address: address of the first host, which all other hosts reach.
            env_of: variables for all ranks of a host, by its name. See [Note: variables].
        """
        nodes = tuple(replace(node, env={**node.env, **env_of.get(node.host.name, {})}) for node in self.nodes)
        return replace(self, master_addr=address, nodes=nodes)

    def with_gpus(self, gpus_of: Mapping[str, tuple[GpuPlace, ...]]) -> LaunchPlan:
        """Returns the plan with what drivers told of the GPUs of hosts, by the host's name."""
        nodes = tuple(replace(node, gpus=gpus_of.get(node.host.name, node.gpus)) for node in self.nodes)
        return replace(self, nodes=nodes)

    def run_by(self, python: str) -> LaunchPlan:
        """Returns the plan as the ranks of one host run it: with that host's interpreter."""
        return replace(self, program=replace(self.program, python=python))

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values; `from_json` reads them back to an equal plan."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LaunchPlan:
        """Reads what `to_json` wrote."""
        program: dict[str, Any] = {**value["program"], "args": tuple(value["program"]["args"])}
        nodes = tuple(
            NodePlan(
                node_rank=node["node_rank"],
                host=HostSpec(**node["host"]),
                workers=tuple(WorkerSpec(**worker) for worker in node["workers"]),
                env=node["env"],
                gpus=tuple(GpuPlace(**gpu) for gpu in node["gpus"]),
                chosen=None if node["chosen"] is None else tuple(node["chosen"]),
            )
            for node in value["nodes"]
        )
        outside = None if value["outside"] is None else Outside(**value["outside"])
        fields: dict[str, Any] = {**value, "program": Program(**program), "nodes": nodes, "outside": outside}
        return cls(**fields)


def make_plan(
    allocation: Allocation,
    program: Program,
    *,
    job_id: str,
    start: StartMethod,
    cwd: str,
    env: dict[str, str],
    run_dir: str,
    grace_s: float,
    nonce: str,
    bind: Bind = "auto",
    max_restarts: int = 0,
    worker_env: dict[str, dict[str, str]] | None = None,
    chosen: Mapping[str, tuple[int, ...]] | None = None,
    stdin_rank: int | None = None,
    outside: Outside | None = None,
    steps_on_host: bool = False,
) -> LaunchPlan:
    """Numbers the ranks host by host and puts the launch together.

    Args:
        allocation: hosts in rank order.
        program: program that each rank runs.
        job_id: id of the job.
        start: way to start ranks: `fork` or `exec`.
        cwd: working folder of every rank.
        env: variables for all ranks.
        run_dir: folder of the job's files.
        grace_s: seconds between asking and killing.
        nonce: secret word of the job.
        bind: rule for the cores that each rank may run on.
        max_restarts: number of times that the job may be started again.
        worker_env: variables for all ranks of one host, by host name.
        chosen: GPUs that the ranks of a host take, by host name; None, or a host without an entry, leaves them as they
            are. See `NodePlan`.
        stdin_rank: the rank that gets dsrun's own stdin, if one does.
        outside: the job's other hosts, where they have a dsrun of their own; the allocation is one host then.
        steps_on_host: whether the optimizer's step computes in host memory; see `LaunchPlan`.
    """
    assert outside is None or len(allocation.hosts) == 1, "of a job with hosts outside, this dsrun starts one"
    nodes: list[NodePlan] = []
    first_rank = 0 if outside is None else outside.node_rank * allocation.world_size
    for node_rank, host in enumerate(allocation.hosts):
        extra = (worker_env or {}).get(host.name, {})
        workers = tuple(
            WorkerSpec(rank=first_rank + local_rank, local_rank=local_rank, env=dict(extra))
            for local_rank in range(host.slots)
        )
        nodes.append(NodePlan(node_rank=node_rank, host=host, workers=workers, chosen=(chosen or {}).get(host.name)))
        first_rank += host.slots
    return LaunchPlan(
        job_id=job_id,
        program=program,
        start=start,
        cwd=cwd,
        env=env,
        run_dir=run_dir,
        grace_s=grace_s,
        nodes=tuple(nodes),
        nonce=nonce,
        bind=bind,
        max_restarts=max_restarts,
        stdin_rank=stdin_rank,
        outside=outside,
        steps_on_host=steps_on_host,
    )
