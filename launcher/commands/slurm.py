"""`dsrun slurm`: a run as a script that Slurm runs later, on nodes that it chooses. Submits it, and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import click

from dsrun.errors import LaunchError, UsageError
from dsrun.files.atomic import write_atomic

from ..jobs.folder import make_state_folder, new_job_id, state_paths
from ..options.resubmit_args import check_run_words, divide
from ..options.script_command import own_options_first
from ..os_errors import refusal_of
from ..scheduler.batch_script import batch_script, output_of, sbatch_words

_PATIENCE_S = 120.0
_ALL_NODES = "dsrun starts the ranks of all nodes of the Slurm job"
#: Options of the run that have no sense here, and why.
_SENSELESS = {
    "--dry-run": "`--print` shows what would be submitted",
    "--node-rank": _ALL_NODES,
    "--master-addr": _ALL_NODES,
    "--master-port": _ALL_NODES,
}


class _OptionsFirst(click.Command):
    """Its own options stand before the script, among those of `dsrun run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads its own options, and leaves all else as it was typed."""
        own = {name for param in self.get_params(ctx) for name in param.opts if name.startswith("-")}
        return super().parse_args(ctx, own_options_first(args, own))


@click.command("slurm", cls=_OptionsFirst, short_help="Submit a run to Slurm.")
@click.option("--print", "only_print", is_flag=True, help="Print the batch script; submit nothing.")
@click.option("--json", "as_json", is_flag=True, help="Id, script and output file as one object on stdout.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]... [-- SBATCH_OPTIONS...]")
@click.pass_context
def command(ctx: click.Context, only_print: bool, as_json: bool, words: tuple[str, ...]) -> int:
    """Submit `dsrun run SCRIPT ARGS` to Slurm, and print the job's id.

    Words before SCRIPT are options of `dsrun run`. Words behind the last `--` are sbatch's; times may be written as
    `30m`, `2h` or `1d`:

    \b
      dsrun slurm train.py -- --nodes 4 --gpus-per-node 8 -t 2h

    The job's nodes are the hosts, its GPUs on each the ranks there. Its exit code is that of `dsrun run`.
    """
    run_words, behind = divide(words)
    run = check_run_words(ctx, run_words, files_are_here=True, senseless=_SENSELESS)
    options = sbatch_words(behind)
    cwd = _working_folder()
    text = batch_script([sys.executable, "-m", "dsrun", "run", *run_words], options, script=run.script, cwd=cwd)
    data = text.encode("utf-8", "surrogateescape")
    if only_print:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return 0
    path = _write(data)
    job_id = _submit(path)
    output = output_of(options, job_id=job_id, cwd=cwd)
    if as_json:
        shown = {"schema_version": 1, "slurm_job_id": job_id, "script": str(path), "output": output}
        click.echo(json.dumps(shown))
    else:
        click.echo(job_id)
        where = "" if output is None else f"; its output goes to {output}"
        click.echo(f"dsrun: Slurm job {job_id} waits{where}; `scancel {job_id}` ends it", err=True)
    return 0


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError("the working folder does not exist any more", hint="`cd` to another") from error


def _write(data: bytes) -> Path:
    """Keeps the script where only this user reads it: words of a command may be secret."""
    folder = state_paths(os.environ).batch_scripts
    path = folder / f"{new_job_id(datetime.now())}.sh"
    try:
        make_state_folder(folder, os.environ)
        write_atomic(path, data, mode=0o600)
    except OSError as error:
        raise UsageError(
            f"{folder}: the batch script cannot be kept there: {refusal_of(error)}",
            hint="set XDG_STATE_HOME to a folder that can be written to, or submit what `--print` shows",
        ) from error
    return path


def _submit(path: Path) -> str:
    """Returns the id of the new job."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
        )
    except FileNotFoundError as error:
        raise LaunchError(
            "there is no `sbatch` here: Slurm's client is not installed, or not in PATH",
            hint="submit from a login node, or take the script that `dsrun slurm --print` shows there",
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = refusal_of(error) if isinstance(error, OSError) else f"no answer within {_PATIENCE_S:g} s"
        raise LaunchError(f"`sbatch` cannot be asked: {reason}", hint="see whether `sinfo` answers") from error
    if done.returncode != 0:
        said = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        raise LaunchError(
            f"Slurm refuses the job: {said or f'sbatch ended with {done.returncode}'}",
            hint=f"the script is {path}; `sbatch {path}` submits it without dsrun",
        )
    return done.stdout.strip().partition(";")[0]
