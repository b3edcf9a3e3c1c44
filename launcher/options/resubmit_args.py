"""Words of a `dsrun run` that is to run elsewhere, later: divided from those of the scheduler, and checked now.

Knows no scheduler. What only the machine that runs it can tell, GPUs and free memory, is left to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
from click.core import ParameterSource

from dsrun.errors import Problem, UsageError

from ..launch.job_config import check_config
from ..plan.launch_plan import Program
from ..plan.program import check_program, find_program
from ..plan.script_args import ScriptWords, split_script_words
from .script_command import all_are_scripts

#: Options that no scheduler's job can obey, and why.
_SENSELESS = {
    "--detach": "the scheduler's job would end as soon as it has begun",
    "--queue": "the scheduler has a queue of its own",
    "--stdin": "a scheduler's job has no terminal, and its stdin is empty",
}


@dataclass(frozen=True, slots=True)
class RunWords:
    """What a scheduler's job has to know of the run.

    Attributes:
        script: its script or module.
        grace_s: seconds that ranks have to end.
        ranks_per_host: number of ranks on each host as the user gave it; None where it was not given.
        backend: backend by which ranks talk, as the user gave it, `gloo` with `--no-gpu`; None where it was not given.
    """

    script: str
    grace_s: float
    ranks_per_host: int | None
    backend: str | None


def divide(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides words at the last `--`; returns those before and those behind. Without one, nothing is behind."""
    if "--" not in words:
        return list(words), []
    at = len(words) - 1 - list(reversed(words)).index("--")
    return list(words[:at]), list(words[at + 1 :])


def check_run_words(
    ctx: click.Context, words: Sequence[str], *, files_are_here: bool, senseless: Mapping[str, str]
) -> RunWords:
    """Reads the words as `dsrun run` will, and returns what they say.

    Args:
        ctx: click's context of the verb.
        words: words that will stand after `dsrun run`.
        files_are_here: script and config are files of this machine; they must be there, and the config be fit.
        senseless: options of `dsrun run` that the verb leaves no sense to, and why.

    Raises:
        click.UsageError: an option is unknown or has no value.
        InputError: there is no script, a file is not as it must be, or an option makes no sense in a job that a
            scheduler starts.
    """
    group = ctx.find_root().command
    assert isinstance(group, click.Group), "verbs have a group"
    run = group.get_command(ctx, "run")
    assert run is not None, "it is in the table"
    read = run.make_context("run", list(words), parent=ctx.parent)
    given = read.params
    verb = ctx.info_name
    if not given["words"]:
        raise UsageError("no script is named", hint=f"`dsrun {verb} train.py -- --nodes 2`; see `dsrun {verb} --help`")
    typed = {
        option
        for param in run.params
        if read.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        for option in param.opts
    }
    problems = [
        Problem(f"`{option}` makes no sense with `dsrun {verb}`: {reason}", "leave it out")
        for option, reason in {**_SENSELESS, **senseless}.items()
        if option in typed
    ]
    if problems:
        raise UsageError.of(problems)
    if files_are_here:
        asked = "module" if given.get("module") else "command" if given.get("no_python") else None
        kind, target = find_program(given["words"][0], kind=asked)
        check_program(Program(kind=kind, target=target, args=(), python=""), verbs=())
        # How many ranks there will be is for the scheduler to say.
        check_config(given["config"], _split(read), None, os.environ)
    return RunWords(
        script=given["words"][0],
        grace_s=given["grace"],
        ranks_per_host=given["ranks_per_host"],
        backend="gloo" if given["no_gpu"] else given["backend"],
    )


def _split(read: click.Context) -> ScriptWords:
    return split_script_words(read.params["words"][1:], all_are_scripts=all_are_scripts(read))
