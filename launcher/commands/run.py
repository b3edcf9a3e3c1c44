"""`dsrun run`: options -> checked launch -> session -> exit code. What each step does stands in the module it calls."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import UsageError
from dsrun.units import format_duration

from ..failures import FailureReport, RankEnd
from ..hostfile import MAX_SLOTS
from ..job_folder import jobs_folder, make_job_folder, new_job_id
from ..output import terminal_printer
from ..plan import LaunchPlan, ProgramKind, StartMethod
from ..plan_text import describe_plan
from ..resolve import Backend, Launch, Request, resolve
from ..script_words import misplaced_options
from ..stopping import StopRequests

if TYPE_CHECKING:
    from ..tally import Outcome

DEFAULT_GRACE_S = 10.0


def parse_seconds(text: str) -> float:
    """Reads `10`, `10s`, `1.5s` or `2m`."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)(s|m|)", text)
    if match is None:
        raise click.BadParameter(f"expected a time like `10s` or `2m`, got `{text}`")
    return float(match.group(1)) * (60 if match.group(2) == "m" else 1)


def parse_ranks(text: str) -> int:
    """Reads a number of ranks on one host."""
    if re.fullmatch(r"[0-9]{1,9}", text) is None or not 1 <= int(text) <= MAX_SLOTS:
        raise click.BadParameter(f"expected a number of ranks from 1 to {MAX_SLOTS}, got `{text}`")
    return int(text)


def parse_path(text: str) -> str:
    """Refuses an empty word, which an unset variable of a shell leaves and which would mean the working folder."""
    if not text:
        raise click.BadParameter("expected a path, got an empty word")
    return text


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--ranks-per-host",
    type=parse_ranks,
    metavar="N",
    help="Ranks on each host; without it one for each GPU, or one.",
)
@click.option("-H", "--hostfile", type=parse_path, metavar="FILE", help="Hosts of the job, one `host slots=N` a line.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with `python -m`.")
@click.option("--no-python", is_flag=True, help="SCRIPT is any program, run as it is.")
@click.option(
    "--config",
    type=parse_path,
    metavar="FILE",
    help="Training config, checked before anything starts. May stand after the script too.",
)
@click.option("--backend", type=click.Choice(["nccl", "gloo"]), help="How ranks talk; without it the script chooses.")
@click.option(
    "--start",
    type=click.Choice(["fork", "exec"]),
    help="fork: import torch once for all ranks (default). exec: a fresh interpreter for each.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="K[=V]",
    help="Set a variable for all ranks; K alone copies it from here. Repeatable.",
)
@click.option(
    "--log-dir",
    type=parse_path,
    metavar="DIR",
    help="Make the job's folder in DIR instead of ~/.local/state/dsrun/jobs.",
)
@click.option(
    "--grace",
    type=parse_seconds,
    default=f"{DEFAULT_GRACE_S:g}s",
    show_default=True,
    metavar="SECONDS",
    help="Time ranks have to end by themselves when the job is stopped.",
)
@click.option("--model", metavar="MODEL", help="What the script trains, as for `dsrun plan`: refuse what cannot fit.")
@click.option("--no-plan", is_flag=True, help="Start also what cannot fit.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout: the plan with --dry-run, else the outcome; ranks' lines go to stderr.",
)
@click.option("-q", "--quiet", is_flag=True, help="No notes from dsrun itself, errors excepted.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
@click.pass_context
def command(
    ctx: click.Context,
    ranks_per_host: int | None,
    hostfile: str | None,
    module: bool,
    no_python: bool,
    config: str | None,
    backend: Backend | None,
    start: StartMethod | None,
    env: tuple[str, ...],
    log_dir: str | None,
    grace: float,
    model: str | None,
    no_plan: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    words: tuple[str, ...],
) -> int:
    """Start SCRIPT on every rank and stay until the last one has ended.

    Words after SCRIPT are the script's. Only `--config FILE` is dsrun's there too: it is checked, and ranks find it
    as DSRUN_CONFIG. Words after `--` are the script's without exception.

    Lines of the ranks come tagged `[rank]`: stdout on stdout, stderr on stderr. The job's folder has the complete
    log of each rank.

    \b
    Exit code:
      0      every rank ended well
      2      wrong arguments, config or hostfile; nothing was started
      74     a host was lost or could not run its ranks
      130    stopped with Ctrl-C (143 on SIGTERM, 129 on SIGHUP)
      141    stopped because nobody reads its output (`| head`)
      other  that of the rank that failed first; 128 + N if signal N killed it
    """
    kind = _program_kind(module=module, no_python=no_python, start=start)
    if not words:
        raise UsageError("no script is named", hint="`dsrun train.py` runs one; see `dsrun run --help`")
    request = Request(
        kind=kind,
        words=words,
        ranks_per_host=ranks_per_host,
        hostfile=hostfile,
        config=config,
        env=env,
        backend=backend,
        start=start or ("exec" if no_python else "fork"),
        grace_s=grace,
    )
    launch = resolve(request, environ=os.environ, verbs=_verbs(ctx))
    folder = jobs_folder(os.environ) if log_dir is None else Path(log_dir)
    if not no_plan:
        from ..estimate_check import check_fits

        check_fits(launch, model=model, jobs=[folder], environ=os.environ)
    if dry_run:
        job_id = new_job_id(datetime.now())
        _show_plan(launch.plan(job_id=job_id, run_dir=str(folder.absolute() / job_id)), as_json=as_json)
        return 0
    job_id, run_dir = make_job_folder(folder, lambda: new_job_id(datetime.now()))
    return _run(launch, launch.plan(job_id=job_id, run_dir=str(run_dir)), as_json=as_json, quiet=quiet)


def _program_kind(*, module: bool, no_python: bool, start: StartMethod | None) -> ProgramKind:
    if module and no_python:
        raise UsageError("`-m` and `--no-python` exclude each other", hint="leave one of them out")
    if no_python and start == "fork":
        raise UsageError("`--no-python` cannot fork a program that is not Python", hint="leave `--start fork` out")
    return "module" if module else "command" if no_python else "script"


def _verbs(ctx: click.Context) -> list[str]:
    group = ctx.parent.command if ctx.parent is not None else None
    return group.list_commands(ctx) if isinstance(group, click.Group) else []


def _show_plan(plan: LaunchPlan, *, as_json: bool) -> None:
    click.echo(json.dumps(plan.to_json(), indent=2) if as_json else describe_plan(plan))


def _run(launch: Launch, plan: LaunchPlan, *, as_json: bool, quiet: bool) -> int:
    from ..job_output import JobOutput
    from ..job_run import JobRun, Policies
    from ..transport.local import LocalTransport

    printer = terminal_printer(
        hosts=[node.host.name for node in plan.nodes for _ in node.workers],
        quiet=quiet,
        stdout_is_data=as_json,
        environ=os.environ,
        on_closed=lambda: stops.output_closed(),
        keep_waiting=lambda: job.obey_requests(),
    )
    output = JobOutput(plan, printer)
    job = JobRun(plan, LocalTransport(), output, python=sys.executable, policies=Policies())
    stops = StopRequests(job.request_stop)
    for warning in launch.warnings:
        printer.warning(warning)
    printer.note(_opening(launch, plan))
    started_s = time.monotonic()
    with stops.catching_signals():
        outcome = job.run()
    output.close()
    duration_s = time.monotonic() - started_s
    report = None if outcome.report is None else [*outcome.report.render(), *_hints(launch, outcome.report)]
    if report is not None:
        printer.report(report)
    was_stopped = outcome.report is None and outcome.exit_code != 0
    exit_code = stops.exit_code(outcome.exit_code) if was_stopped else outcome.exit_code
    printer.note(_closing(plan, outcome, duration_s))
    if as_json:
        click.echo(json.dumps(outcome_json(plan, outcome, report, exit_code=exit_code, duration_s=duration_s)))
    return exit_code


def _hints(launch: Launch, report: FailureReport) -> list[str]:
    """Says so where a script stumbled over an option that was meant for dsrun."""
    if not isinstance(report.cause, RankEnd) or report.cause.status != UsageError.exit_code:
        return []
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("-")}
    misplaced = misplaced_options(launch.request.words[1:], report.cause.last_lines, options=options)
    return [f"hint: `{option}` is an option of dsrun; put it before the script" for option in misplaced]


def _opening(launch: Launch, plan: LaunchPlan) -> str:
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    hosts = plan.nodes[0].host.name if len(plan.nodes) == 1 else f"{len(plan.nodes)} hosts"
    what = f"{ranks} on {hosts}, {launch.devices}, {plan.program.target}"
    return f"job {plan.job_id}: {what}, logs in {_short(plan.run_dir)}"


def _closing(plan: LaunchPlan, outcome: Outcome, duration_s: float) -> str:
    after = f"after {format_duration(duration_s)}"
    if outcome.exit_code == 0:
        return f"job {plan.job_id}: done {after}"
    if outcome.report is None:
        return f"job {plan.job_id}: stopped {after}, logs in {_short(plan.run_dir)}"
    return f"job {plan.job_id}: failed {after} with exit code {outcome.exit_code}, logs in {_short(plan.run_dir)}"


def _short(path: str) -> str:
    """Writes the home folder as `~`, which a shell reads back."""
    home = os.path.expanduser("~")
    return f"~{path[len(home) :]}" if home != "/" and path.startswith(f"{home}/") else path


def outcome_json(
    plan: LaunchPlan, outcome: Outcome, report: Sequence[str] | None, *, exit_code: int, duration_s: float
) -> dict[str, Any]:
    """Returns what `--json` prints at the end of a run.

    Args:
        plan: the launch.
        outcome: how it ended.
        report: why it failed, in lines; None if it did not.
        exit_code: what dsrun exits with.
        duration_s: from starting the agents to the last rank's end.
    """
    return {
        "schema_version": 1,
        "job_id": plan.job_id,
        "outcome": "done" if outcome.exit_code == 0 else "stopped" if report is None else "failed",
        "exit_code": exit_code,
        "duration_s": round(duration_s, 3),
        "run_dir": plan.run_dir,
        "failure": report,
        "ranks": [
            {"rank": end.rank, "host": end.host, "pid": end.pid, "status": end.status, "log": end.log}
            for end in outcome.ends
        ],
    }
