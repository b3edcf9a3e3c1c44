"""Flags, environment and files -> one checked launch. Flags meet the machine here and nowhere else.

Reads files and asks the driver, starts and writes nothing. All problems are found before any is reported.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from dsrun.contract import BACKEND_ENV
from dsrun.errors import InputError, Problem, UsageError

from .affinity import Binding
from .devices import Demand, Held
from .environment import THREADS_ENV, job_environment, parse_env_options
from .host_binding import read_bindings
from .hostfile import read_hostfile
from .hosts import Allocation
from .job_config import check_config
from .plan import Bind, LaunchPlan, Program, ProgramKind, StartMethod, make_plan
from .probe import host_names
from .probe_gpu import GpuReport, read_gpus
from .probe_versions import read_versions
from .program import check_program, find_program, start_method
from .script_words import ScriptWords, split_script_words
from .selection import is_local, select_hosts, select_local

Backend = Literal["nccl", "gloo"]

_T = TypeVar("_T")
_NO_WORDS = ScriptWords(args=(), config=None, deepspeed_config=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for, not yet checked against anything.

    Attributes:
        kind: how `words[0]` is to be understood; None means by what the file is.
        words: the script and everything after it.
        ranks_per_host: None means as many as there are GPUs.
        hostfile: None means this machine.
        config: `--config` from before the script.
        env: values of `--env`.
        backend: None leaves the choice to the script.
        start: how ranks are made; None means by fork where that can be.
        grace_s: seconds between asking and killing.
        bind: which cores each rank may run on.
        max_restarts: how often the job may be started again.
    """

    kind: ProgramKind | None = None
    words: tuple[str, ...]
    ranks_per_host: int | None = None
    hostfile: str | None = None
    config: str | None = None
    env: tuple[str, ...] = ()
    backend: Backend | None = None
    start: StartMethod | None = None
    grace_s: float = 10.0
    bind: Bind = "auto"
    max_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A checked launch; only the job's id and folder are missing.

    Attributes:
        request: where it came from.
        program: what each rank runs.
        start: how ranks are made.
        allocation: where.
        cwd: working folder of every rank.
        env: variables for all ranks.
        local_hosts: names of those hosts of the allocation that are this machine.
        demand: what the job wants of this machine, for `job_queue.hold_devices`.
        devices: `nccl`, `gloo`, `2 GPUs` or `no GPU`: what the job trains on, for the eye.
        warnings: what config and devices will not do as one may expect, as `warning:` lines; they stop nothing.
    """

    request: Request
    program: Program
    start: StartMethod
    allocation: Allocation
    cwd: str
    env: dict[str, str]
    local_hosts: frozenset[str]
    demand: Demand
    devices: str
    warnings: tuple[str, ...] = ()

    def plan(self, *, job_id: str, run_dir: str, held: Held | None = None) -> LaunchPlan:
        """Completes the plan.

        Args:
            job_id: id of the job.
            run_dir: its folder.
            held: what `hold_devices` yielded: the ranks of this machine see these devices.
        """
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
        )
        return plan if held is None else _with_devices(plan, held, self.local_hosts)

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
            if host.name in self.local_hosts:
                bindings = read_bindings(self.request.bind, host.slots, given)
                if threads.isdecimal():
                    bindings = tuple(replace(binding, threads=int(threads)) for binding in bindings)
                found[host.name] = bindings
        return found


def _with_devices(plan: LaunchPlan, held: Held, local_hosts: frozenset[str]) -> LaunchPlan:
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


@dataclass(slots=True)
class _Findings:
    """Problems of several checks, gathered so that the user sees all of them at once."""

    problems: list[Problem] = field(default_factory=list[Problem])

    def attempt(self, check: Callable[[], _T]) -> _T | None:
        """Returns what `check` returns, or None after noting what it found wrong."""
        try:
            return check()
        except InputError as error:
            self.problems += error.problems
            return None


def resolve(request: Request, *, environ: Mapping[str, str], verbs: Sequence[str]) -> Launch:
    """Checks a request against the machine and the files it names.

    Args:
        request: what was asked for.
        environ: the environment the ranks inherit.
        verbs: dsrun's own, for a first word that was meant to be one.

    Raises:
        UsageError: carries every problem of program, hosts, variables, backend and config.
    """
    cwd = _working_folder()
    findings = _Findings()
    words = findings.attempt(lambda: split_script_words(request.words[1:])) or _NO_WORDS
    kind, target = find_program(request.words[0], kind=request.kind)
    program = Program(kind=kind, target=target, args=words.args, python=sys.executable)
    findings.attempt(lambda: check_program(program, verbs=verbs))
    start: StartMethod | None = findings.attempt(lambda: start_method(program, request.start))
    user_env = findings.attempt(lambda: parse_env_options(request.env, environ=environ)) or {}
    choice = findings.attempt(lambda: _choose_backend(request.backend, environ)) or _BackendChoice(None, "")
    gpus = _gpus_if_needed(choice.backend, environ)
    allocation = findings.attempt(lambda: _allocate(request, gpus))
    if choice.backend == "nccl" and gpus is not None:
        versions = read_versions()
        findings.attempt(
            lambda: check_nccl(gpus, allocation, torch=versions.torch, cuda=versions.cuda, asked_by=choice.asked_by)
        )
    config = findings.attempt(lambda: check_config(request.config, words, allocation, environ))
    if findings.problems or allocation is None or start is None:
        raise UsageError.of(findings.problems)
    path, warnings = config or (None, ())
    names = host_names()
    local_hosts = frozenset(host.name for host in allocation.hosts if is_local(host.name, local_names=names))
    return Launch(
        request=request,
        program=program,
        start=start,
        allocation=allocation,
        cwd=cwd,
        env=job_environment(user=user_env, config=path, backend=choice.backend),
        local_hosts=local_hosts,
        demand=_demand(allocation, local_hosts, gpus),
        devices=choice.backend or _devices(gpus),
        warnings=(*warnings, *slice_warnings(gpus)),
    )


@dataclass(frozen=True, slots=True)
class _BackendChoice:
    """How ranks talk, None leaves it to the script; and where that was said, for messages."""

    backend: Backend | None
    asked_by: str


def _choose_backend(asked: Backend | None, environ: Mapping[str, str]) -> _BackendChoice:
    """Returns `--backend`, else what DSRUN_BACKEND in the environment says: ranks would find it all the same."""
    if asked is not None:
        return _BackendChoice(asked, f"`--backend {asked}`")
    inherited = environ.get(BACKEND_ENV, "")
    if inherited not in ("", "nccl", "gloo"):
        raise UsageError(
            f"`{BACKEND_ENV}` in the environment is `{inherited[:200]}`; expected nccl or gloo",
            hint=f"`unset {BACKEND_ENV}`, or use `--backend`",
        )
    return _BackendChoice(inherited or None, f"`{BACKEND_ENV}={inherited}`")


def _demand(allocation: Allocation, local_hosts: frozenset[str], gpus: GpuReport | None) -> Demand:
    ranks = sum(host.slots for host in allocation.hosts if host.name in local_hosts)
    return Demand(ranks=ranks, gpus=0 if gpus is None else min(ranks, gpus.usable_count))


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError("the working folder does not exist any more", hint="`cd` to another") from error


def _gpus_if_needed(backend: Backend | None, environ: Mapping[str, str]) -> GpuReport | None:
    """Asks the driver unless the answer could change nothing: waking it can take a second."""
    return None if backend == "gloo" else read_gpus(environ)


def _devices(gpus: GpuReport | None) -> str:
    count = 0 if gpus is None else gpus.usable_count
    return f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"


def slice_warnings(gpus: GpuReport | None) -> tuple[str, ...]:
    """Says what a script on several MIG slices has to know. See [Note: MIG] of devices."""
    if gpus is None or gpus.slice_count < 2:
        return ()
    return (
        f"warning: CUDA_VISIBLE_DEVICES names {gpus.slice_count} MIG slices: each rank sees its own as cuda:0, and "
        "NCCL does not connect slices of one GPU",
    )


def _allocate(request: Request, gpus: GpuReport | None) -> Allocation:
    if request.hostfile is None:
        device_count = 0 if gpus is None else gpus.usable_count
        return select_local(ranks_per_host=request.ranks_per_host, device_count=device_count)
    hosts = read_hostfile(Path(request.hostfile))
    return select_hosts(hosts, ranks_per_host=request.ranks_per_host, local_names=host_names())


def check_nccl(
    gpus: GpuReport,
    allocation: Allocation | None,
    *,
    torch: str | None,
    cuda: str | None,
    asked_by: str = "`--backend nccl`",
) -> None:
    """Looks whether NCCL can work: it needs a CUDA build of torch and a GPU of its own for every rank.

    Args:
        gpus: what the driver reports.
        allocation: the hosts, where they are known.
        torch: version of torch beside this interpreter, if any.
        cuda: what that torch was built for; None for a CPU build.
        asked_by: who wants it, for messages.

    Raises:
        UsageError: it cannot.
    """
    way_out = "`--backend gloo` trains on the CPU"
    if gpus.usable_count == 0:
        reason = gpus.reason or "CUDA_VISIBLE_DEVICES hides all of them"
        raise UsageError(f"{asked_by} needs a GPU and this machine offers none: {reason}", hint=way_out)
    if torch is not None and cuda is None:
        raise UsageError(f"{asked_by} needs CUDA and torch {torch} is built without it", hint=way_out)
    slots = max((host.slots for host in allocation.hosts), default=0) if allocation is not None else 0
    if slots > gpus.usable_count:
        raise UsageError(
            f"{asked_by} needs a GPU for each rank; {slots} ranks share {gpus.usable_count}",
            hint=f"use `-n {gpus.usable_count}`",
        )
