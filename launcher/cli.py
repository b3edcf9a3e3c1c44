"""The command line: verbs, `dsrun SCRIPT` as short for `dsrun run SCRIPT`, and the one place that exits.

Verbs are imported when they are used, so `dsrun --help` loads click and the standard library only. A new verb is one
module in commands/ with a `command`, and one row in `VERBS`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from dsrun import __version__
from dsrun.errors import DsrunError, Problem

from .console.printer import CLOSED_PIPE_EXIT
from .os_errors import refusal_of
from .plan.foreign_options import instead_of, read_as_letters

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Verb -> what `dsrun --help` says about it; the module is commands/<verb>.py.
VERBS = {
    "run": "Start a script on every rank (the verb may be left out).",
    "ps": "List jobs that run or wait, and those of the last day.",
    "logs": "Print what the ranks of a job wrote.",
    "attach": "Follow a job to its end.",
    "top": "Show how the ranks of running jobs fare.",
    "watch": "Watch a job train: loss, speed, memory, slow ranks.",
    "metrics": "Serve figures of jobs to Prometheus.",
    "stop": "End jobs.",
    "show": "Show everything about a job.",
    "export": "Give a job's records to trackers.",
    "memory": "Show what a job's memory was used for.",
    "report": "Write a page with plots of jobs, for a browser.",
    "trace": "Merge the profiles of a job's ranks, and sum them up.",
    "rerun": "Run a job's command again, and say what changed.",
    "rm": "Remove jobs that have ended.",
    "queue": "List jobs that hold or wait for devices.",
    "probe": "Show host, processor, memory, GPUs and versions.",
    "nvme": "Find the fastest settings for disks that offload uses.",
    "config": "Check training configs.",
    "checkpoint": "List, check, compare, convert and remove checkpoints.",
    "slurm": "Submit a run to Slurm, on nodes that it chooses.",
    "k8s": "Print a run as a Kubernetes JobSet.",
    "plan": "Predict memory and the shortest step before anything runs.",
    "doctor": "Check whether this machine is fit for jobs.",
    "completion": "Print the script for completion in a shell.",
}

_CONTEXT = {"help_option_names": ["-h", "--help"]}
_GROUP_OPTIONS = frozenset({"-h", "--help", "--version"})
_INTERRUPTED = 130
#: Arguments that name jobs, and what they may be.
_JOBS = frozenset({"job", "jobs"})
_JOB = "JOB is an id, how one begins, its last four letters, or `last`"
#: Of two names, from 0 to 1, above which one may be meant for the other: `gpus` is no slip for `no-gpu`.
_LIKENESS = 0.7


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        args: the words after `dsrun`; those of this process if None.
    """
    _open_missing_streams()
    words = sys.argv[1:] if args is None else list(args)
    try:
        code = app.main(args=words, prog_name="dsrun", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        _say(_problem_of(error, words).render())
        code = error.exit_code
    except DsrunError as error:
        _say(error.render())
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        code = CLOSED_PIPE_EXIT
    except (OSError, RuntimeError) as error:
        # The machine's refusal, not a fault of ours: a full disk behind stdout, no process, thread or descriptor left.
        refusal = refusal_of(error)
        if refusal is None:
            raise
        _say(Problem(refusal if isinstance(error, OSError) and error.filename else f"cannot go on: {refusal}").render())
        _drop_stdout()
        code = DsrunError.exit_code
    sys.exit(code)


def _drop_stdout() -> None:
    """Leaves what is still in the buffer unwritten; the interpreter would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_missing_streams() -> None:
    """Fills closed descriptors (`>&-`), or the next file that is opened would get what is meant for a terminal."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - stays open as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _with_verb(args: list[str]) -> list[str]:
    """Puts `run` before words that start with neither a verb nor an option of dsrun itself."""
    return args if args[0] in VERBS or args[0] in _GROUP_OPTIONS else ["run", *args]


class LazyVerbs(click.Group):
    """A group whose verbs are imported when they are used, and whose default verb is `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts `run` before words that start with neither a verb nor an option of dsrun itself."""
        if ctx.resilient_parsing:
            # A shell completes; what is missing may still be typed.
            return super().parse_args(ctx, _with_verb(args) if args else args)
        if not args:
            _say(ctx.get_help())
            ctx.exit(2)
        args = _with_verb(args)
        ctx.obj = tuple(args)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the first word: a verb, or what may stand in its place: a script, an option of `run`."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            run = self.get_command(ctx, "run")
            assert run is not None, "it is in the table"
            return run.shell_complete(run.make_context("run", [], parent=ctx, resilient_parsing=True), incomplete)
        verbs = [CompletionItem(verb, help=text) for verb, text in VERBS.items() if verb.startswith(incomplete)]
        return verbs or [CompletionItem(incomplete, type="file")]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a verb's module."""
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f".commands.{cmd_name}", __package__).command
        assert isinstance(command, click.Command), f"commands/{cmd_name}.py has no `command`"
        command.context_settings = {**_CONTEXT, **command.context_settings}
        if any(param.name in _JOBS for param in command.params):
            command.epilog = f"{_JOB}."
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs from the table, so that help imports none of them."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Shows the short form, which is what people type."""
        return ["[OPTIONS] SCRIPT [ARGS]...\n      ", "dsrun", "VERB ..."]


@click.group(cls=LazyVerbs, context_settings=_CONTEXT)
@click.version_option(__version__, message="dsrun %(version)s")
def app() -> None:
    """Start and run distributed PyTorch training.

    \b
      dsrun train.py --config ds.json      a rank on every GPU of this machine
      dsrun -n 2 train.py --lr 3e-4        two ranks; options of dsrun stand
                                           before the script
      dsrun probe                          what hardware there is

    `dsrun run --help` lists the options of a run.
    """


def _problem_of(error: click.ClickException, words: Sequence[str]) -> Problem:
    """Words click's complaints as dsrun's own.

    Args:
        error: the complaint.
        words: words of the command line.
    """
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    command = ctx.command_path if ctx is not None else f"dsrun {_verb_of(words)}".rstrip()
    see = f"see `{command} --help`"
    if command == "dsrun run" and (foreign := _foreign_option(error, words)) is not None:
        return Problem(f"`{command}` has no option `{foreign}`", instead_of(foreign))
    if isinstance(error, click.NoSuchOption):
        # Without the dashes: they are alike in all, and the shorter a name, the more they would count.
        names = {name.lstrip("-"): name for name in error.possibilities or ()}
        close = [names[name] for name in difflib.get_close_matches(error.option_name.lstrip("-"), names, 1, _LIKENESS)]
        way_out = f"did you mean `{close[0]}`?" if close else f"{see}; options of the script stand after it"
        return Problem(f"`{command}` has no option `{error.option_name}`", way_out)
    if isinstance(error, click.MissingParameter) and error.param is not None and ctx is not None:
        way_out = f"{_JOB}; `dsrun ps` lists them" if error.param.name in _JOBS else see
        return Problem(f"`{command}`: {error.param.make_metavar(ctx)} is missing", way_out)
    if isinstance(error, click.BadParameter) and error.param is not None:
        names = "/".join(error.param.opts)
        return Problem(f"`{names}`: {_lower_first(error.message)}", see)
    if isinstance(error, click.BadOptionUsage):
        # Of one that ends the line: nothing follows that could be its value.
        return Problem(f"`{command}`: `{error.option_name}` has no value", see)
    return Problem(_lower_first(error.format_message()), see)


def _foreign_option(error: click.ClickException, words: Sequence[str]) -> str | None:
    """Returns the option of another launcher that click has stumbled over; None if it was none."""
    if isinstance(error, click.NoSuchOption):
        option = error.option_name
        return read_as_letters(words, option[1:]) or (None if instead_of(option) is None else option)
    if isinstance(error, click.BadParameter) and error.param is not None:
        if any(word.partition("=")[0] in error.param.opts for word in words):
            # It was typed as it is called, and the words that look like another launcher's may be the script's.
            return None
        letters = (name[1:] for name in error.param.opts if len(name) == 2)
        return next((found for letter in letters if (found := read_as_letters(words, letter))), None)
    return None


def _verb_of(words: Sequence[str]) -> str:
    """Returns the verb that the words are for; empty where they are dsrun's own options."""
    first = next(iter(_with_verb(list(words[:1]))), "") if words else ""
    return "" if first in _GROUP_OPTIONS else first


def _lower_first(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")


def _say(text: str) -> None:
    """Writes talk to stderr; file names in it may hold bytes that are no UTF-8."""
    data = (text + "\n").encode("utf-8", errors="surrogateescape")
    try:
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
    except BrokenPipeError:
        pass
