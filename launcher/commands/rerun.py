"""`dsrun rerun`: the same request once more, and what has changed on the machine since. Runs what `dsrun run` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import UsageError
from dsrun.units import format_list

from ..jobs.facts import differences, digest_of_file, gone_variables, read_facts
from ..jobs.listing import Job, find_job
from ..jobs.record import JobRecord, read_json
from ..jobs.text import command_text
from ..options.job_argument import job_argument

#: Names of what a hostfile was read from once: the standard input, and the pipe of a shell's `<(command)`.
_PASSING = ("<stdin>", "/dev/stdin", "/dev/fd/", "/proc/self/fd/")
#: Names that a line has room for.
_MOST_NAMES = 8


@click.command("rerun")
@click.option("--no-gpu", is_flag=True, help="Train on the CPU this time: ranks see no GPU.")
@click.option("--dry-run", is_flag=True, help="Say what changed and print the plan; start nothing.")
@job_argument()
@click.pass_context
def command(ctx: click.Context, no_gpu: bool, dry_run: bool, job: str) -> int:
    """Run a job's command again, in its folder, after saying what changed since.

    Compared are versions, GPUs, cores, the git commit, script and config, and the variables that training depends on.
    Nothing is asked. Variables of the shell come from where `rerun` is typed, for only their names were recorded: those
    that are gone are named. `--env NAME=VALUE` of the job is set again, unless it is a secret.
    """
    found = find_job(job, os.environ)
    words = words_again(found.record, environ=frozenset(os.environ))
    try:
        os.chdir(found.record.cwd)
    except OSError as error:
        raise UsageError(
            f"job {found.id}: its folder {found.record.cwd} cannot be entered: {error.strerror}"
        ) from error
    click.echo(f"dsrun: again, as job {found.id}: {command_text(found)}", err=True)
    for line in changes_since(found):
        click.echo(f"dsrun: changed since: {line}", err=True)
    group = ctx.find_root().command
    added = [word for word, is_given in {"--no-gpu": no_gpu, "--dry-run": dry_run}.items() if is_given]
    words = [words[0], *added, *words[1:]]
    # Exits as the run does; `obj` of the new context holds the words of the new job.
    return group.main(args=words, prog_name="dsrun", standalone_mode=False)


def words_again(record: JobRecord, *, environ: frozenset[str]) -> list[str]:
    """Returns the words of the command, to be run again.

    Args:
        record: the job's.
        environ: names of the variables that are set; the value of a masked `--env NAME=***` is taken from there.

    Raises:
        UsageError: a word was masked, or hosts were read from a pipe, and cannot be had again.
    """
    hosts: list[dict[str, Any]] = [node["host"] for node in record.plan.get("nodes") or ()]
    sources = {str(host.get("source", "")).rpartition(":")[0] for host in hosts}
    if passing := sorted(source for source in sources if source.startswith(_PASSING)):
        raise UsageError(
            f"job {record.id}: its hosts came from {passing[0]}, which cannot be read again",
            hint="write them to a file and type the command again with `-H FILE`",
        )
    words = list(record.command)
    for at in record.masked_words:
        name, equals, _ = words[at].removeprefix("--env=").partition("=")
        is_env = at > 0 and (words[at - 1] == "--env" or words[at].startswith("--env="))
        if not (is_env and equals):
            raise UsageError(
                f"job {record.id}: the word `{words[at]}` of its command was not recorded, for it holds a secret",
                hint="type the command again; secrets are safer in variables",
            )
        if name not in environ:
            raise UsageError(
                f"job {record.id}: the value of `--env {name}` was not recorded, for it is a secret",
                hint=f"set {name} in the environment",
            )
        words[at] = f"--env={name}" if words[at].startswith("--env=") else name
    return words


def changes_since(job: Job) -> Sequence[str]:
    """Says what the job depends on that is not as it was, a line each."""
    plan = job.record.plan
    program: dict[str, str] = plan.get("program") or {}
    script = Path(program.get("target", "")).absolute() if program.get("kind") == "script" else None
    folder = Path(job.record.cwd) if script is None else script.parent
    recorded = read_json(JobPaths(job.folder).machine)
    lines: list[str] = []
    if recorded is None:
        lines.append("what the machine was like was not recorded")
    else:
        lines += differences(recorded, read_facts(script=script, folder=folder, environ=os.environ))
        if gone := gone_variables(recorded, os.environ):
            lines.append(
                f"variables that are not set any more: {format_list(gone, _MOST_NAMES)}; set them first, or start jobs "
                "with `--env NAME=VALUE`, which is recorded"
            )
    config, digest = job.record.config, job.record.config_digest
    if config is not None and digest is not None and digest_of_file(Path(config)) != digest:
        lines.append(f"config {config}: its content; the one of then is {job.folder / 'config.json'}")
    return lines
