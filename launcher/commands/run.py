"""`dsrun run`: options -> checked launch -> front end -> exit code. What a step does stands in the module it calls."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dsrun.contract.environment import CONFIG_ENV, MEMORY_HISTORY_ENV, SAID_DEEPSPEED_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.profile_request import ProfileRequest
from dsrun.errors import UsageError

from ..console.rank_set import parse_rank_set
from ..failures.report import EXIT_CODES
from ..jobs.folder import jobs_folder, make_job_folder, new_job_id
from ..launch.checked_launch import Backend, Launch, Request
from ..launch.plan_text import describe_plan
from ..launch.resolve import resolve
from ..launch.stdin_choice import StdinWish
from ..launch.under_other_launcher import become_rank, launcher_of
from ..masking import mask_plan
from ..options.hosts import OTHERS, WHICH, HostOptions, host_options
from ..options.profile import check_profiled_ranks, parse_profile
from ..options.script_command import ScriptCommand, all_are_scripts
from ..options.types import (
    complete_file,
    parse_count,
    parse_duration,
    parse_path,
    parse_ranks,
    parse_seconds,
    parse_stdin,
)
from ..plan.foreign_options import our_spelling
from ..plan.launch_plan import Bind, ProgramKind, StartMethod
from ..plan.program import script_text
from ..transport.base import first_word_patience_s

if TYPE_CHECKING:
    from ..run.front_end import RunSettings
    from ..run.prepare_hosts import HostSettings
    from ..session.job_run import OnHang

DEFAULT_GRACE_S = 10.0
#: What a rank of another launcher obeys too.
_RANK_OPTIONS = frozenset({"module", "no_python", "as_deepspeed", "config", "backend", "no_gpu", "env", "quiet"})


@click.command(
    "run",
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False, "token_normalize_func": our_spelling},
)
@click.option(
    "-n", "--ranks-per-host", type=parse_ranks, metavar="N", help="Ranks on each host.  [default: its GPUs, or 1]"
)
@host_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for `python -m`.")
@click.option("--no-python", is_flag=True, help="SCRIPT is any program, run as it is.")
@click.option(
    "--as-deepspeed", is_flag=True, help="`import deepspeed` gives dsrun; all words after SCRIPT are its own."
)
@click.option("--config", type=parse_path, metavar="FILE", help="Training config; checked first.")
@click.option("--backend", type=click.Choice(["nccl", "gloo"]), help="How ranks talk.  [default: up to SCRIPT]")
@click.option("--no-gpu", is_flag=True, help="Train on the CPU: ranks see no GPU.")
@click.option("--start", type=click.Choice(["fork", "exec"]), help="Import torch once and fork, or start each anew.")
@click.option("--env", multiple=True, metavar="K[=V]", help="Set a variable for all ranks, or pass it on.")
@click.option("--env-file", multiple=True, type=parse_path, metavar="FILE", help="Set those of a file, `K=V` a line.")
@click.option(
    "--bind",
    type=click.Choice(["auto", "none", "cores", "numa"]),
    default="auto",
    metavar="HOW",
    help="Cores of a rank: auto, none, cores or numa.",
)
@click.option("--queue", is_flag=True, help="Wait for free GPUs or slots; see `dsrun queue`.")
@click.option("--priority", type=int, default=0, metavar="N", help="Place in the queue; higher is earlier.")
@click.option("--share-gpus", is_flag=True, help="Take GPUs in use if too few are free.")
@click.option(
    "--grace",
    type=parse_seconds,
    default=f"{DEFAULT_GRACE_S:g}s",
    show_default=True,
    metavar="TIME",
    help="For ranks to end, when stopped.",
)
@click.option(
    "--max-restarts",
    type=parse_count,
    default="0",
    metavar="N",
    help="Start again, from the newest checkpoint.",
)
@click.option(
    "--min-uptime",
    type=parse_seconds,
    default="60s",
    show_default=True,
    metavar="TIME",
    help="After a shorter try, wait longer.",
)
@click.option(
    "--hang-timeout",
    type=parse_duration,
    metavar="TIME",
    help="No progress is a hang after it.  [default: 30m, for ranks with heartbeats]",
)
@click.option(
    "--on-hang",
    type=click.Choice(["report", "stop", "restart"]),
    default="report",
    metavar="HOW",
    help="What then: report (who is where), stop or restart.",
)
@click.option("--model", metavar="MODEL", help="What is trained, as for `dsrun plan`.")
@click.option("--no-plan", is_flag=True, help="Start also what cannot fit into memory.")
@click.option("--memory-history", is_flag=True, help="Name the lines of code that fill the GPU.")
@click.option("--profile", type=parse_profile, metavar="steps=A:B", help="Trace these steps; see `dsrun trace`.")
@click.option("--dry-run", is_flag=True, help="Check all, print the plan, start nothing.")
@click.option("-d", "--detach", is_flag=True, help="Print the job's id and go on in the background.")
@click.option("--log-dir", type=parse_path, metavar="DIR", help="Make the job's folder in DIR.")
@click.option("--ranks", metavar="RANKS", help="Show these ranks only, like `0,8-11`.")
@click.option("--stdin", type=parse_stdin, metavar="RANK", help="Give stdin to this rank.  [default: to a lone one]")
@click.option("--no-progress", is_flag=True, help="No bars and no progress row.")
@click.option("--json", "as_json", is_flag=True, help="Plan, id or outcome as one object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No notes of dsrun itself but errors.")
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGS]...",
    shell_complete=complete_file,
)
@click.pass_context
def command(
    ctx: click.Context,
    ranks_per_host: int | None,
    hosts: HostOptions,
    module: bool,
    no_python: bool,
    as_deepspeed: bool,
    config: str | None,
    backend: Backend | None,
    no_gpu: bool,
    start: StartMethod | None,
    env: tuple[str, ...],
    env_file: tuple[str, ...],
    bind: Bind,
    queue: bool,
    priority: int,
    share_gpus: bool,
    grace: float,
    max_restarts: int,
    min_uptime: float,
    hang_timeout: float | None,
    on_hang: OnHang,
    model: str | None,
    no_plan: bool,
    memory_history: bool,
    profile: ProfileRequest | None,
    dry_run: bool,
    detach: bool,
    log_dir: str | None,
    ranks: str | None,
    stdin: StdinWish,
    no_progress: bool,
    as_json: bool,
    quiet: bool,
    words: tuple[str, ...],
) -> int:
    """Start SCRIPT on every rank and stay until the last one has ended.

    SCRIPT may be any program. Words after it are its own, but for `--config FILE`, which is checked first and given to
    ranks as DSRUN_CONFIG; with `--` before SCRIPT there is no exception.

    With `--as-deepspeed`, scripts written for DeepSpeed run as they are: SCRIPT and all that it starts find dsrun under
    that name, whether DeepSpeed is installed or not.

    Lines come tagged `[rank]`: stdout on stdout, stderr on stderr. `dsrun logs` has all of them again.
    """
    kind = _program_kind(module=module, no_python=no_python)
    if not words:
        raise UsageError("no script is named", hint="`dsrun train.py` runs one; see `dsrun run --help`")
    if as_deepspeed and quiet:
        env = (*env, f"{SAID_DEEPSPEED_ENV}=1")
    launcher = None if hosts.node_rank is not None else launcher_of(os.environ)
    if launcher is not None:
        _refuse_launching(ctx, launcher)
        become_rank(
            launcher,
            words,
            all_are_scripts=all_are_scripts(ctx),
            kind=kind,
            as_deepspeed=as_deepspeed,
            config=config,
            env=env,
            backend=backend,
            no_gpu=no_gpu,
            environ=os.environ,
            quiet=quiet,
        )
    static = hosts.static_node()
    if static is not None and max_restarts:
        raise UsageError(
            "`--max-restarts` and `--node-rank` cannot be used together: a job is started again by one dsrun for all "
            "hosts",
            hint="name the hosts with `-H FILE`, or let what starts dsrun on the nodes start it again",
        )
    request = Request(
        kind=kind,
        words=words,
        all_are_scripts=all_are_scripts(ctx),
        as_deepspeed=as_deepspeed,
        hosts=replace(hosts.request(ranks_per_host), static=static),
        config=config,
        env=(*env, f"{MEMORY_HISTORY_ENV}=1") if memory_history else env,
        env_files=env_file,
        workdir=hosts.workdir,
        sync=hosts.sync,
        backend=backend,
        no_gpu=no_gpu,
        start=start,
        grace_s=grace,
        bind=bind,
        max_restarts=max_restarts,
        stdin=stdin,
        is_detached=detach,
        for_remote=hosts.for_remote(),
        for_local=_for_local(queue=queue, priority=priority, share_gpus=share_gpus),
    )
    driver = ctx.with_resource(ExitStack())
    launch = resolve(request, environ=os.environ, verbs=_verbs(ctx), keep=driver)
    launch = _with_profile(_with_hang_warning(launch, hang_timeout), profile)
    folder = jobs_folder(os.environ) if log_dir is None else Path(log_dir)
    if launch.open_config is not None:
        from ..estimate.open_axes import with_planned_axes

        launch = with_planned_axes(launch, model=model, jobs=[folder], environ=os.environ, is_allowed=not no_plan)
    if launch.placement.remote_hosts:
        if model is not None and launch.open_config is None:
            raise UsageError(
                "`--model` predicts for this machine alone, and the job has other hosts",
                hint=f"`dsrun plan {model} --gpus 2x8xH100-80G` predicts for hosts like the ones named",
            )
    elif not no_plan and launch.placement.static is None and (model is not None or CONFIG_ENV in launch.env):
        # Imported where there is something to predict: it takes a fifth of what a launch without a config takes.
        from ..estimate.fits import check_fits

        check_fits(launch, model=model, jobs=[folder], environ=os.environ)
    if dry_run:
        job_id = new_job_id(datetime.now())
        plan = launch.plan(job_id=job_id, run_dir=str(folder.absolute() / job_id))
        _warn(launch, quiet=quiet)
        reached = launch.reached()
        click.echo(
            json.dumps({**mask_plan(plan.to_json()), "reached": reached}, indent=2)
            if as_json
            else describe_plan(plan, bindings=launch.bindings(os.environ), reached=reached)
        )
        return 0
    shown = None if ranks is None else parse_rank_set(ranks, launch.placement.world_size)
    if isinstance(stdin, int) and shown is not None and stdin not in shown:
        raise UsageError(
            f"`--stdin {stdin}` and `--ranks {ranks}`: what rank {stdin} asks would not be seen",
            hint=f"`--ranks {ranks},{stdin}` shows it too",
        )
    own = folder.parent if log_dir is None else None
    job_id, run_dir = make_job_folder(folder, lambda: new_job_id(datetime.now()), own=own)
    from ..run.front_end import Hold, RunSettings
    from ..session.job_run import Policies

    settings = RunSettings(
        words=ctx.find_root().obj,
        options=frozenset(name for option in ctx.command.params for name in option.opts if name.startswith("-")),
        policies=Policies(
            max_restarts=max_restarts,
            min_uptime_s=min_uptime,
            hang_timeout_s=hang_timeout,
            on_hang=on_hang,
            start_timeout_s=hosts.start_timeout,
            first_word_s=first_word_patience_s(hosts.connect_timeout, hosts.start_timeout),
        ),
        hold=Hold(queue=queue, priority=priority, share_gpus=share_gpus),
        hosts=_host_settings(hosts) if launch.placement.remote_hosts else None,
        detached=detach,
        shown=shown,
        progress=not no_progress,
        as_json=as_json,
        quiet=quiet,
    )
    if detach:
        # The driver's library is not to be shared by two processes.
        driver.close()
        return _run_detached(launch, settings, job_id=job_id, run_dir=run_dir)
    return _run(launch, settings, job_id=job_id, run_dir=run_dir, on_held=driver.close)


def _run(launch: Launch, settings: RunSettings, *, job_id: str, run_dir: Path, on_held: Callable[[], None]) -> int:
    from ..run.front_end import FrontEnd

    outcome = FrontEnd(launch, settings, job_id=job_id, folder=run_dir, on_held=on_held).run()
    if settings.as_json:
        click.echo(json.dumps(outcome))
    return outcome["exit_code"]


def _run_detached(launch: Launch, settings: RunSettings, *, job_id: str, run_dir: Path) -> int:
    from ..jobs.detach import run_in_background
    from ..run.front_end import FrontEnd

    _warn(launch, quiet=settings.quiet)
    run_in_background(
        lambda ready: FrontEnd(launch, settings, job_id=job_id, folder=run_dir).run(ready),
        log=str(JobPaths(run_dir).front_end_log),
    )
    if settings.as_json:
        click.echo(json.dumps({"schema_version": 1, "job_id": job_id, "run_dir": str(run_dir)}))
    else:
        click.echo(job_id)
    if not settings.quiet:
        click.echo(f"dsrun: `dsrun logs {job_id} -f` follows the job, `dsrun stop {job_id}` ends it", err=True)
    return 0


def _refuse_launching(ctx: click.Context, launcher: str) -> None:
    """Refuses what only a launcher could obey, where this process is one rank of another's."""
    given = [
        option.opts[0]
        for option in ctx.command.params
        if isinstance(option, click.Option)
        and option.name not in _RANK_OPTIONS
        and ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            f"`{given[0]}` is for a launcher, and {launcher} has started this process as one of its ranks",
            hint=f"leave it to {launcher}, or run dsrun without {launcher}",
        )


def _for_local(*, queue: bool, priority: int, share_gpus: bool) -> tuple[str, ...]:
    """Returns the options given that mean something for this machine only, as one would type them."""
    given = {"--queue": queue, f"--priority {priority}": priority != 0, "--share-gpus": share_gpus}
    return tuple(word for word, is_given in given.items() if is_given)


def _warn(launch: Launch, *, quiet: bool) -> None:
    for line in () if quiet else (*launch.warnings, *(f"dsrun: {note}" for note in launch.notes)):
        click.echo(line, err=True)


def _with_hang_warning(launch: Launch, hang_timeout_s: float | None) -> Launch:
    """Returns the launch with a warning more where NCCL would end ranks before they are looked at."""
    if hang_timeout_s is None or launch.devices.startswith(("gloo", "no ")):
        return launch
    from ..failures.hang import watchdog_warning

    text, name = script_text(launch.program), os.path.basename(launch.program.target)
    return replace(launch, warnings=(*launch.warnings, *watchdog_warning(hang_timeout_s, text, name=name)))


def _with_profile(launch: Launch, profile: ProfileRequest | None) -> Launch:
    """Returns the launch with the steps to profile among the variables of its ranks."""
    if profile is None:
        return launch
    check_profiled_ranks(profile, launch.placement.world_size)
    return replace(launch, env={**launch.env, **profile.to_env()})


def _host_settings(hosts: HostOptions) -> HostSettings:
    from ..run.prepare_hosts import HostSettings

    return HostSettings(
        ssh_config=hosts.ssh_config_path,
        connect_timeout_s=hosts.connect_timeout,
        start_timeout_s=hosts.start_timeout,
        accept_new_host_keys=hosts.accept_new_host_keys,
        iface=hosts.iface,
        preflight=not hosts.no_preflight,
        copied_folder=os.getcwd() if hosts.sync else None,
    )


def _program_kind(*, module: bool, no_python: bool) -> ProgramKind | None:
    """Returns what the flags say that SCRIPT is; None leaves it to the file."""
    if module and no_python:
        raise UsageError("`-m` and `--no-python` exclude each other", hint="leave one of them out")
    return "module" if module else "command" if no_python else None


def _verbs(ctx: click.Context) -> list[str]:
    group = ctx.parent.command if ctx.parent is not None else None
    return group.list_commands(ctx) if isinstance(group, click.Group) else []


assert isinstance(command, ScriptCommand), "as its decorator says"
command.tables = {"Exit code": EXIT_CODES}
command.sections = {
    "Where": ("ranks_per_host", *WHICH, "bind", "queue", "priority", "share_gpus"),
    "What": (
        "module",
        "no_python",
        "as_deepspeed",
        "config",
        "backend",
        "no_gpu",
        "start",
        "env",
        "env_file",
        "model",
        "no_plan",
        "memory_history",
        "profile",
        "dry_run",
    ),
    "Other hosts": OTHERS,
    "When it fails": ("grace", "max_restarts", "min_uptime", "hang_timeout", "on_hang"),
    "What you see": ("detach", "log_dir", "ranks", "stdin", "no_progress", "as_json", "quiet", "help"),
}
