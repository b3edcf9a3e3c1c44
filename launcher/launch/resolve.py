"""Flags, environment and files -> one checked launch. Flags meet the machine here and nowhere else.

Reads files and asks the driver, starts and writes nothing. All problems are found before any is reported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dsrun.as_deepspeed.version import wanted_version
from dsrun.contract.environment import BACKEND_ENV
from dsrun.errors import InputError, Problem, UsageError

from ..hosts.spec import HostSpec
from ..machine.devices.choice import Demand
from ..machine.devices.unusable import unusable_gpus
from ..machine.gpus.left_out import LeftOutGpus
from ..machine.gpus.nvml import nvml_kept_open
from ..machine.gpus.read import GpuReport, device_count, left_out_of, read_gpus
from ..machine.proc_files import host_names
from ..machine.software.versions import read_versions
from ..machine.verdict import Context
from ..machine.verdicts.no_gpus import no_gpu_verdicts
from ..machine.verdicts.torch_build import cpu_build_verdicts
from ..monitors.checks import problems_of
from ..plan.env_file import read_env_file
from ..plan.environment import counted_environ, job_environment, parse_env_options, passed_on, threads_warnings
from ..plan.gpu_order import check_order, order_warnings
from ..plan.launch_plan import Program, StartMethod
from ..plan.program import check_program, find_program, start_method, start_warnings
from ..plan.script_args import ScriptWords, split_script_words
from ..rendezvous.host_addresses import addresses
from .checked_launch import NCCL_WITHOUT_GPU, Backend, Launch, Request
from .host_placement import Placement, StaticNode, place
from .job_config import JobConfig, check_config

_T = TypeVar("_T")
_NO_WORDS = ScriptWords(args=(), config=None, deepspeed_config=None)


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

    def holds(self, check: Callable[[], object]) -> bool:
        """Returns whether `check` found nothing wrong."""
        before = len(self.problems)
        self.attempt(check)
        return len(self.problems) == before


def resolve(
    request: Request,
    *,
    environ: Mapping[str, str],
    verbs: Sequence[str],
    load_nvml: Callable[[], Any] | None = None,
    root: Path = Path("/"),
    keep: ExitStack | None = None,
) -> Launch:
    """Checks a request against the machine and the files it names.

    Args:
        request: launch that the user asked for.
        environ: the environment the ranks inherit.
        verbs: dsrun's own, for a first word that was meant to be one.
        load_nvml: function that returns the `pynvml` module; tests give a made-up one.
        root: `/`, or a made-up tree with proc, sys and dev, in which GPUs are looked for.
        keep: the driver stays open in it once it was asked: GPUs that sleep wake once for a launch, not each time.

    Raises:
        UsageError: carries every problem of program, hosts, variables, backend and config.
    """
    here = _working_folder()
    findings = _Findings()
    words = (
        findings.attempt(lambda: split_script_words(request.words[1:], all_are_scripts=request.all_are_scripts))
        or _NO_WORDS
    )
    kind, target = find_program(request.words[0], kind=request.kind)
    program = Program(kind=kind, target=target, args=words.args, python=sys.executable)
    program_at = len(findings.problems)
    start: StartMethod | None = findings.attempt(lambda: start_method(program, request.start))
    files = [findings.attempt(lambda path=path: read_env_file(path)) or {} for path in request.env_files]
    options = findings.attempt(lambda: parse_env_options(request.env, environ=environ)) or {}
    asked: dict[str, str] = {name: value for given in (*files, options) for name, value in given.items()}
    counted = counted_environ(environ, asked)
    as_deepspeed = findings.attempt(lambda: wanted_version({**environ, **asked})) if request.as_deepspeed else None
    choice = findings.attempt(lambda: _choose_backend(request, environ)) or _BackendChoice(None, "")
    asks_driver = choice.backend != "gloo"

    def ask() -> GpuReport | None:
        if asks_driver and keep is not None:
            keep.enter_context(nvml_kept_open(load_nvml))
        return read_gpus(counted, load_nvml=load_nvml, root=root) if asks_driver else None

    machine = _Machine(ask)
    placement = findings.attempt(
        lambda: place(
            request.hosts, environ=environ, local_names=host_names(), device_count=lambda: machine.device_count
        )
    )
    findings.attempt(lambda: _check_interface(request.hosts.static))
    local = _local_hosts(placement)
    if placement is None or local or kind == "script":
        # What is installed on other hosts alone need not be here; a script is named by its path here.
        found = _Findings()
        found.attempt(lambda: check_program(program, verbs=verbs))
        findings.problems[program_at:program_at] = found.problems
    gpus = machine.gpus if placement is None or local else None
    is_served = gpus is None or findings.holds(lambda: check_gpus(gpus, environ=counted, root=root))
    if choice.backend == "nccl" and gpus is not None and is_served:
        versions = read_versions()
        findings.attempt(
            lambda: check_nccl(gpus, local, torch=versions.torch, cuda=versions.cuda, asked_by=choice.asked_by)
        )
    visible = counted.get("CUDA_VISIBLE_DEVICES")
    demand = findings.attempt(lambda: demand_of(local, gpus, visible=visible))
    places = () if gpus is None else gpus.places
    findings.attempt(lambda: check_order(places, {**environ, **asked}, chosen=_chosen_by(local)))
    paths = _Paths(
        here, request.workdir, synced=request.sync and placement is not None and bool(placement.remote_hosts)
    )
    if local:
        findings.attempt(paths.check)
    world_size = None if placement is None else placement.world_size
    config = findings.attempt(lambda: check_config(request.config, words, world_size, environ))
    if config is not None and (placement is None or _has_records(placement)):
        findings.problems += [problem for each in config.monitors for problem in problems_of(each, folder=paths.folder)]
    if findings.problems or placement is None or start is None or demand is None:
        raise UsageError.of(findings.problems)
    config = config or JobConfig()
    passed = passed_on(environ) if placement.remote_hosts else {}
    user_env = {**passed, **asked}
    launch = Launch(
        request=request,
        program=replace(program, target=paths.target(program)),
        start=start,
        placement=placement,
        cwd=paths.folder,
        env=job_environment(
            user=user_env,
            config=None if config.path is None else paths.there(config.path),
            backend=choice.backend,
            as_deepspeed=as_deepspeed,
        ),
        demand=demand,
        devices=_devices(request, choice, gpus, has_others=bool(placement.remote_hosts)),
        gpus=places,
        steps_on_host=config.steps_on_host,
        open_config=config.open_source,
        monitors=config.monitors if _has_records(placement) else (),
        warnings=(
            *config.warnings,
            *start_warnings(program, request.start),
            *gpu_warnings(gpus, visible=visible),
            *order_warnings(places, {**environ, **asked}),
            *threads_warnings(passed, asked),
            *_idle_warnings(program, gpus),
            *_unused_warnings(request, placement),
            *(f"warning: {remark}" for remark in placement.remarks),
        ),
    )
    # Refused now if it must be.
    _ = launch.stdin_rank
    return launch


class _Machine:
    """The GPUs of this machine, asked for once and only where the answer changes something: it can take a second.

    Args:
        ask: function that returns the driver's report on the GPUs; None for a job that uses no GPU.
    """

    def __init__(self, ask: Callable[[], GpuReport | None]) -> None:
        self._ask = ask
        self._report: GpuReport | None = None

    @property
    def gpus(self) -> GpuReport | None:
        """What the driver reports; None for a job that uses no GPU."""
        if self._report is None:
            self._report = self._ask()
        return self._report

    @property
    def device_count(self) -> int:
        """GPUs the job may use here."""
        return 0 if self.gpus is None else self.gpus.usable_count


@dataclass(frozen=True, slots=True)
class _BackendChoice:
    """How ranks talk, None leaves it to the script; and where that was said, for messages."""

    backend: Backend | None
    asked_by: str


class _Paths:
    """What names of files here become for the ranks.

    Args:
        here: the folder dsrun was started in.
        workdir: `--workdir`.
        synced: the folder here is copied to that one, so that what is in it is there too.
    """

    def __init__(self, here: str, workdir: str | None, *, synced: bool) -> None:
        self._here = here
        self._synced = synced
        #: Working folder of every rank.
        self.folder = here if workdir is None else os.path.abspath(workdir)

    def check(self) -> None:
        """Looks whether ranks of this machine can work there."""
        if not self._synced and not os.path.isdir(self.folder):
            raise UsageError(
                f"`--workdir`: {self.folder} is no folder of this machine",
                hint="make it first, or leave `--workdir` out",
            )

    def target(self, program: Program) -> str:
        """Returns what ranks run: relative names of files are meant from here, wherever ranks work."""
        is_file = program.kind == "script" or os.sep in program.target
        if not is_file or self.folder == self._here:
            return program.target
        return self.there(os.path.abspath(program.target))

    def there(self, path: str) -> str:
        """Returns an absolute path of this machine as ranks find it."""
        inside = os.path.relpath(path, self._here)
        is_copied = self._synced and inside != os.pardir and not inside.startswith(os.pardir + os.sep)
        return os.path.join(self.folder, inside) if is_copied else path


def _choose_backend(request: Request, environ: Mapping[str, str]) -> _BackendChoice:
    """Returns what the words say, else what DSRUN_BACKEND in the environment says: ranks would find it all the same."""
    if request.no_gpu and request.backend == "nccl":
        raise UsageError.of([NCCL_WITHOUT_GPU])
    if request.no_gpu:
        return _BackendChoice("gloo", "`--no-gpu`")
    if request.backend is not None:
        return _BackendChoice(request.backend, f"`--backend {request.backend}`")
    inherited = environ.get(BACKEND_ENV, "")
    if inherited not in ("", "nccl", "gloo"):
        raise UsageError(
            f"`{BACKEND_ENV}` in the environment is `{inherited[:200]}`; expected nccl or gloo",
            hint=f"`unset {BACKEND_ENV}`, or use `--backend`",
        )
    return _BackendChoice(inherited or None, f"`{BACKEND_ENV}={inherited}`")


def _has_records(placement: Placement) -> bool:
    """Whether the records of the job come to this machine: of several nodes the first one has them."""
    return placement.static is None or placement.static.node_rank == 0


def _local_hosts(placement: Placement | None) -> tuple[HostSpec, ...]:
    if placement is None:
        return ()
    return tuple(host for host in placement.allocation.hosts if host.name in placement.local_hosts)


def _check_interface(static: StaticNode | None) -> None:
    """Looks whether the interfaces of `--iface` are there; on one of several nodes ranks get the names as they are."""
    if static is None or static.interface is None:
        return
    there: dict[str, str] = {}
    for entry in addresses():
        there.setdefault(entry.interface, entry.address)
    missing = [name for name in static.interface.split(",") if name not in there]
    if missing:
        raise UsageError(
            f"`--iface {missing[0]}`: no interface of that name has an address",
            hint=f"there is {', '.join(f'{name} ({address})' for name, address in there.items())}",
        )


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError("the working folder does not exist any more", hint="`cd` to another") from error


def _devices(request: Request, choice: _BackendChoice, gpus: GpuReport | None, *, has_others: bool) -> str:
    """Says what the job trains on; nothing where only other hosts know."""
    if request.no_gpu:
        return "no GPU (--no-gpu)"
    if choice.backend is not None or has_others:
        return choice.backend or ""
    count = 0 if gpus is None else gpus.usable_count
    return f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"


def _unused_warnings(request: Request, placement: Placement) -> Iterator[str]:
    """Says of options for other hosts that there is none, and of options for this machine that no rank runs here."""
    if request.no_gpu and "--share-gpus" in request.for_local:
        yield "warning: `--share-gpus` has no effect: `--no-gpu` takes none"
    if not placement.remote_hosts:
        words, reason = request.for_remote, "dsrun starts ranks on this machine alone"
    elif not placement.local_hosts:
        words, reason = request.for_local, "it is about GPUs and slots of this machine, where no rank runs"
    else:
        return
    for word in words:
        yield f"warning: `{word}` has no effect: {reason}"


def _chosen_by(local: Sequence[HostSpec]) -> str | None:
    """Names what has chosen GPUs of this machine by their numbers, for a message."""
    return next((host.source for host in local if host.gpus is not None), None)


def demand_of(local: Sequence[HostSpec], gpus: GpuReport | None, *, visible: str | None = None) -> Demand:
    """Returns what the ranks of this machine need of it.

    Args:
        local: the hosts that are this machine.
        gpus: the driver's report on the GPUs of this machine; None for a job that uses no GPU.
        visible: CUDA_VISIBLE_DEVICES of the job; None where it is not set.

    Raises:
        UsageError: GPUs were chosen that are not there, several hosts would share those of this machine, or there was
            to be a rank for each GPU and one of them is left out.
    """
    ranks = sum(host.slots for host in local)
    count = 0 if gpus is None else gpus.usable_count
    if count and len(local) > 1:
        raise UsageError(
            f"`--transport local` makes {len(local)} hosts of this machine, which has one set of GPUs",
            hint="`--backend gloo` trains on the CPU",
        )
    chosen = local[0].gpus if local else None
    if gpus is not None and count and chosen is None and _named(visible, at_least=ranks):
        there, left_out = device_count(gpus, visible), left_out_of(gpus)
        if there < ranks <= there + sum(one.count for one in left_out):
            reason = "; ".join(one.text for one in left_out)
            raise UsageError(
                f"{local[0].source}: {ranks} ranks, one a GPU, and {there} can be used: {reason}",
                hint="; ".join([f"`-n {there}` trains on those that are left", *(one.fix for one in left_out)]),
            )
    if not count or chosen is None:
        return Demand(ranks=ranks, gpus=min(ranks, count))
    missing = [gpu for gpu in chosen if gpu >= count]
    if missing:
        there = "GPU 0 only" if count == 1 else f"GPUs 0 to {count - 1}"
        raise UsageError(
            f"{local[0].source}: GPU {missing[0]} is asked for, and this process sees {there}",
            hint="ids count the GPUs that CUDA_VISIBLE_DEVICES names; `dsrun probe` shows them",
        )
    return Demand(ranks=ranks, gpus=len(chosen), chosen=chosen)


def check_gpus(
    gpus: GpuReport,
    *,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    import_path: Sequence[str] | None = None,
) -> None:
    """Looks whether this machine has accelerators that a job would go without, unasked: it would train on the CPU.

    Args:
        gpus: the driver's report on the GPUs of this machine.
        environ: environment of the job.
        root: `/`, or a made-up tree.
        import_path: folders in which torch is looked for instead of `sys.path`; None for `sys.path`.

    Raises:
        UsageError: the driver does not serve its GPUs, or they are of another maker.
    """
    unusable = unusable_gpus(gpus, environ, root=root, import_path=import_path)
    if unusable is not None:
        raise UsageError(unusable.text, hint=unusable.fix)


def gpu_warnings(gpus: GpuReport | None, *, visible: str | None = None) -> tuple[str, ...]:
    """Says which GPUs a job goes without: those that are left out, and those that it was not given.

    Args:
        gpus: the driver's report on the GPUs of this machine; None for a job that uses no GPU.
        visible: CUDA_VISIBLE_DEVICES of the job; None where it is not set.
    """
    if gpus is None:
        return ()
    left_out = [one for one in left_out_of(gpus) if _may_be_meant(one, gpus, visible)] if gpus.usable_count else []
    idle = no_gpu_verdicts(None, gpus.idle, context=Context(trains=True))
    return tuple(f"warning: {one.text}; {one.fix}" for one in (*left_out, *idle))


def _named(visible: str | None, *, at_least: int) -> bool:
    """Whether CUDA_VISIBLE_DEVICES names so many devices; where it is not set, it means all of the machine."""
    return visible is None or len(visible.split(",")) >= at_least


def _may_be_meant(left_out: LeftOutGpus, gpus: GpuReport, visible: str | None) -> bool:
    """Whether a job would have GPUs that are left out, by its CUDA_VISIBLE_DEVICES, or has others in their place."""
    if visible is None or _named(visible, at_least=gpus.usable_count + 1):
        return True
    # CUDA does not count them: numbers from theirs on name other GPUs than before.
    numbers = [int(entry) for entry in visible.split(",") if entry.strip().isdecimal()]
    return left_out.kind in ("lost", "closed") and max(numbers, default=-1) >= left_out.gpus[0]


def _idle_warnings(program: Program, gpus: GpuReport | None) -> tuple[str, ...]:
    """Says that the installed torch cannot use GPUs that are there. Who installs a CPU build may mean it."""
    if gpus is None or not gpus.usable_count or program.kind == "command":
        return ()
    judged = cpu_build_verdicts(read_versions(), gpus=gpus.usable_count, context=Context(trains=True))
    return tuple(f"warning: {one.text}; {one.fix}" for one in judged)


def check_nccl(
    gpus: GpuReport,
    hosts: Sequence[HostSpec],
    *,
    torch: str | None,
    cuda: str | None,
    asked_by: str = "`--backend nccl`",
) -> None:
    """Looks whether NCCL can work here: it needs a CUDA build of torch and a GPU of its own for every rank.

    Args:
        gpus: the driver's report on the GPUs of this machine.
        hosts: those that are this machine, where they are known.
        torch: version of torch beside this interpreter, if any.
        cuda: CUDA version that torch was built for; None for a CPU build.
        asked_by: option or variable that asks for NCCL, for messages.

    Raises:
        UsageError: it cannot.
    """
    way_out = "`--backend gloo` trains on the CPU"
    if gpus.usable_count == 0:
        reason = gpus.reason or "CUDA_VISIBLE_DEVICES hides all of them"
        raise UsageError(f"{asked_by} needs a GPU and this machine offers none: {reason}", hint=way_out)
    if torch is not None and cuda is None:
        raise UsageError(f"{asked_by} needs CUDA and torch {torch} is built without it", hint=way_out)
    slots = max((host.slots for host in hosts), default=0)
    if slots > gpus.usable_count:
        raise UsageError(
            f"{asked_by} needs a GPU for each rank; {slots} ranks share {gpus.usable_count}",
            hint=f"use `-n {gpus.usable_count}`",
        )
