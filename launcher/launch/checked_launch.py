"""A checked launch: what was asked for, and what became of it. Only the job's id and folder are missing to its plan.

A value, made by `resolve`. What it asks the machine for is which cores its ranks would get, when it is shown.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dsrun.contract.monitor_records import MonitorSettings
from dsrun.errors import Problem

from ..hosts.spec import Allocation
from ..machine.devices.choice import Demand, DeviceLease
from ..machine.processor.rank_binding import read_bindings
from ..plan.affinity import Binding
from ..plan.environment import THREADS_ENV, interface_variables
from ..plan.launch_plan import Bind, GpuPlace, LaunchPlan, Outside, Program, ProgramKind, StartMethod, make_plan
from ..rendezvous.static_nodes import shared_nonce
from ..transport.choice import describe_reach
from .host_placement import HostRequest, Placement, StaticNode
from .stdin_choice import StdinObstacle, StdinWish, choose_stdin_rank

Backend = Literal["nccl", "gloo"]
#: What hides all GPUs from a rank.
NO_GPU_ENV = {"CUDA_VISIBLE_DEVICES": ""}
NCCL_WITHOUT_GPU = Problem(
    "`--no-gpu` and `--backend nccl` cannot be used together: NCCL moves tensors of GPUs", "leave one of them out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for, not yet checked against anything.

    Attributes:
        kind: kind of program that `words[0]` is; None means that the file decides.
        words: the script and everything after it.
        all_are_scripts: no word after the script is dsrun's, not even `--config`.
        as_deepspeed: `import deepspeed` gives dsrun.
        hosts: request for hosts: which ones, how many, and the way to them.
        config: `--config` from before the script.
        env: values of `--env`.
        env_files: values of `--env-file`.
        workdir: `--workdir`; None means the folder here.
        sync: the folder here is copied to the working folder of every host first.
        backend: None leaves the choice to the script.
        no_gpu: ranks see no GPU, on any host.
        start: way to start ranks: `fork` or `exec`; None means by fork where that is possible.
        grace_s: seconds between asking and killing.
        bind: rule for the cores that each rank may run on.
        max_restarts: number of times that the job may be started again.
        stdin: rank that gets dsrun's own stdin; `none` for none; None for the only rank there is.
        is_detached: the job runs in the background, and has no stdin.
        for_remote: options given that mean something for other hosts only, as they were typed.
        for_local: the same for this machine only.
    """

    kind: ProgramKind | None = None
    words: tuple[str, ...]
    all_are_scripts: bool = False
    as_deepspeed: bool = False
    hosts: HostRequest = field(default_factory=HostRequest)
    config: str | None = None
    env: tuple[str, ...] = ()
    env_files: tuple[str, ...] = ()
    workdir: str | None = None
    sync: bool = False
    backend: Backend | None = None
    no_gpu: bool = False
    start: StartMethod | None = None
    grace_s: float = 10.0
    bind: Bind = "auto"
    max_restarts: int = 0
    stdin: StdinWish = None
    is_detached: bool = False
    for_remote: tuple[str, ...] = ()
    for_local: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A checked launch.

    Attributes:
        request: request from which this launch was made.
        program: program that each rank runs.
        start: way to start ranks: `fork` or `exec`.
        placement: hosts and slots that the ranks go to.
        cwd: working folder of every rank.
        env: variables for all ranks.
        demand: ranks and devices that the job wants of this machine, for `turn.hold_devices`.
        devices: `nccl`, `gloo`, `2 GPUs` or `no GPU`: what the job trains on, for the eye; empty where only other hosts
            know.
        gpus: those of this machine, in CUDA's order; empty where its driver was not asked.
        steps_on_host: the config says that the optimizer's step computes in host memory.
        open_config: path or text of the config, where it leaves sizes of axes to a plan; None where it leaves none.
        monitors: trackers that the config switches on, with their secrets.
        notes: decisions that dsrun has made for the user, a line each.
        warnings: `warning:` lines about results that may surprise the user; they stop nothing.
    """

    request: Request
    program: Program
    start: StartMethod
    placement: Placement
    cwd: str
    env: dict[str, str]
    demand: Demand
    devices: str
    gpus: tuple[GpuPlace, ...] = ()
    steps_on_host: bool = False
    open_config: str | None = None
    monitors: tuple[MonitorSettings, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def allocation(self) -> Allocation:
        """The hosts, in rank order."""
        return self.placement.allocation

    def plan(self, *, job_id: str, run_dir: str, held: DeviceLease | None = None) -> LaunchPlan:
        """Completes the plan.

        Args:
            job_id: id of the job.
            run_dir: its folder.
            held: devices that `hold_devices` yielded, which the ranks of this machine will see; None leaves the plan as
                it is.
        """
        static = self.placement.static
        plan = make_plan(
            self.allocation,
            self.program,
            job_id=job_id,
            start=self.start,
            cwd=self.cwd,
            env=self.env,
            run_dir=run_dir,
            grace_s=self.request.grace_s,
            nonce=secrets.token_hex(16),
            bind=self.request.bind,
            max_restarts=self.request.max_restarts,
            worker_env=self._hidden_gpus(),
            chosen={} if self.request.no_gpu else _chosen_devices(self.placement),
            steps_on_host=self.steps_on_host,
            stdin_rank=self.stdin_rank,
            outside=None if static is None else _outside(static),
        )
        if static is not None:
            plan = plan.at(static.master_addr, _interface_of(static, self.allocation))
            plan = replace(plan, nonce=shared_nonce(plan, os.environ))
        plan = plan.with_gpus(dict.fromkeys(self.placement.local_hosts, self.gpus))
        return plan if held is None else _with_devices(plan, held, self.placement.local_hosts)

    def _hidden_gpus(self) -> dict[str, dict[str, str]]:
        """Returns what hides all GPUs from all ranks, whatever a hostfile or a shell says, where that was asked for."""
        hosts = self.allocation.hosts if self.request.no_gpu else ()
        return {host.name: NO_GPU_ENV for host in hosts}

    @property
    def stdin_rank(self) -> int | None:
        """The rank that gets dsrun's own stdin; see `choose_stdin_rank`."""
        return choose_stdin_rank(self.request.stdin, self.placement, taken=self.stdin_taken)

    @property
    def stdin_taken(self) -> StdinObstacle | None:
        """Why no rank at all can have dsrun's own stdin, if that is so."""
        if self.request.is_detached:
            return StdinObstacle("a job in the background has no stdin", "without `-d` a rank can be given dsrun's own")
        if self.request.hosts.hostfile == "-":
            return StdinObstacle("`-H -` reads the hosts from it", "name a file of hosts")
        return None

    def bindings(self, environ: Mapping[str, str]) -> dict[str, tuple[Binding, ...]]:
        """Looks where the ranks of this machine would run; other machines resolve that themselves.

        Args:
            environ: the environment the ranks inherit.

        Returns:
            by name of the host; threads are those the user asked for, where OMP_NUM_THREADS is set.
        """
        given = {**environ, **self.env}
        threads = given.get(THREADS_ENV, "").split(",")[0].strip()
        found: dict[str, tuple[Binding, ...]] = {}
        for host in self.allocation.hosts:
            if host.name in self.placement.local_hosts:
                bindings = read_bindings(
                    self.request.bind,
                    [{**given, **host.env}] * host.slots,
                    gpus=self.gpus,
                    whole_sockets=self.steps_on_host,
                )
                if threads.isdecimal():
                    bindings = tuple(replace(binding, threads=int(threads)) for binding in bindings)
                found[host.name] = bindings
        return found

    def reached(self) -> dict[str, str]:
        """Says how each host is reached, by its name."""
        place = self.placement
        return {
            host.name: describe_reach(host, place.transport, is_local=host.name in place.local_hosts)
            for host in place.allocation.hosts
        }


def _outside(static: StaticNode) -> Outside:
    return Outside(
        node_rank=static.node_rank,
        node_count=static.node_count,
        port=static.master_port,
        patience_s=static.patience_s,
    )


def _interface_of(static: StaticNode, allocation: Allocation) -> dict[str, dict[str, str]]:
    if static.interface is None:
        return {}
    return {host.name: interface_variables(static.interface) for host in allocation.hosts}


def _chosen_devices(placement: Placement) -> dict[str, tuple[int, ...]]:
    """Returns which GPUs ranks of other hosts take, where a filter or the hostfile chose; by name of the host."""
    return {host.name: host.gpus for host in placement.remote_hosts if host.gpus is not None}


def _with_devices(plan: LaunchPlan, held: DeviceLease, local_hosts: frozenset[str]) -> LaunchPlan:
    nodes = tuple(
        replace(
            node,
            workers=tuple(
                replace(worker, env={**worker.env, **held.environment(worker.local_rank)}) for worker in node.workers
            ),
        )
        if node.host.name in local_hosts
        else node
        for node in plan.nodes
    )
    return replace(plan, nodes=nodes)
