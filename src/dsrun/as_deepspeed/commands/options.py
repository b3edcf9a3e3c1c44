"""The words of DeepSpeed's `deepspeed` command, as a value. Which options there are; not what becomes of them.

Names, defaults and kinds are those of DeepSpeed 0.19.8, whose parser is Python's argparse as well: abbreviations
(`--num_g 2`), `--flag=value` and where the script's own words begin are understood alike.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dsrun.errors import Problem, UsageError

#: Where DeepSpeed looks for hosts unasked.
HOSTFILE = "/job/hostfile"
MASTER_PORT = 29500
#: What `--enable_each_rank_log` is where nobody asks for it.
NO_LOG = "None"
_LEVELS = ("debug", "info", "warning", "error", "critical")
#: Options of older versions, by what dsrun does instead.
_REMOVED = dict.fromkeys(
    ("--elastic_training", "--min_elastic_nodes", "--max_elastic_nodes"),
    "`dsrun --as-deepspeed --max-restarts N` starts a job again from its newest checkpoint",
)
_HELP = "`deepspeed --help` lists the options; those of the script stand after it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed, by DeepSpeed's names; `--help` says what each is."""

    hostfile: str
    include: str
    exclude: str
    num_nodes: int
    num_gpus: int
    master_addr: str
    master_port: int
    node_rank: int
    launcher: str
    launcher_args: str
    module: bool
    no_python: bool
    no_local_rank: bool
    no_ssh: bool
    no_ssh_check: bool
    force_multi: bool
    save_pid: bool
    enable_each_rank_log: str
    autotuning: str
    bind_cores_to_rank: bool
    bind_core_list: str | None
    ssh_port: int | None
    venv_script: str | None
    log_level: str
    quiet: bool
    user_script: str
    user_args: list[str]


def parse(words: Sequence[str]) -> Options:
    """Reads the words of a `deepspeed` command.

    Args:
        words: words after `deepspeed`.

    Raises:
        UsageError: carries each option that there is not, or what argparse finds wrong.
        SystemExit: help was asked for, and is printed.
    """
    found, unknown = _parser().parse_known_args(words)
    if unknown:
        raise UsageError.of([_unknown(word) for word in unknown if word.startswith("-")] or [_unknown(unknown[0])])
    return Options(**vars(found))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Words argparse's complaint as dsrun's own."""
        if "required: SCRIPT" in message:
            raise UsageError("deepspeed: no script is named", hint="`deepspeed train.py` runs one; see `deepspeed -h`")
        raise UsageError(f"deepspeed: {message}", hint=_HELP)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="deepspeed",
        usage="deepspeed [OPTIONS] SCRIPT [ARGS]...",
        description="Start SCRIPT on every rank, as DeepSpeed's command does, with dsrun: `dsrun run --as-deepspeed`.",
        epilog="`dsrun run --help` lists what dsrun can do beyond it.",
    )

    def add(*names: str, says: str, **kind: Any) -> None:
        parser.add_argument(*names, help=says, **kind)

    def flag(name: str, says: str) -> None:
        add(name, says=says, action="store_true")

    add("-H", "--hostfile", default=HOSTFILE, metavar="FILE", says="hosts, one `host slots=N` a line [%(default)s]")
    add("-i", "--include", default="", metavar="FILTER", says="take only these: `w0@w1:0,2`")
    add("-e", "--exclude", default="", metavar="FILTER", says="take all but these")
    add("--num_nodes", type=int, default=-1, metavar="N", says="take the first N hosts")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", says="ranks on each host")
    add("--master_port", type=int, default=MASTER_PORT, metavar="PORT", says="with --no_ssh: a free port of node 0")
    add("--master_addr", default="", metavar="ADDR", says="with --no_ssh: where node 0 is")
    add("--node_rank", type=int, default=-1, metavar="R", says="with --no_ssh: which node this one is")
    add("--launcher", default="pdsh", metavar="HOW", says="slurm: hosts are reached by srun; all others: by ssh")
    add("--launcher_args", default="", metavar="WORDS", says="refused: what ssh needs stands in ssh_config")
    flag("--module", "SCRIPT is a module, as for `python -m`")
    flag("--no_python", "SCRIPT is any program, run as it is")
    flag("--no_local_rank", "add no `--local_rank=N` to the script's words")
    flag("--no_ssh", "start the ranks of this node alone; the command is given on each")
    flag("--no_ssh_check", "start without comparing the hosts first")
    flag("--force_multi", "reach the only host of a hostfile, and do not take it for this machine")
    flag("--save_pid", "no effect: `dsrun ps` and `dsrun show` know the processes")
    add("--enable_each_rank_log", default=NO_LOG, metavar="DIR", says="keep the job's folder, with all output, in DIR")
    add("--autotuning", default="", choices=["tune", "run"], says="refused: `dsrun plan --fit MODEL` finds a config")
    flag("--bind_cores_to_rank", "give each rank cores of its own")
    add("--bind_core_list", metavar="CORES", says="with it: of these cores, like `0-3,8`")
    add("--ssh_port", type=int, metavar="PORT", says="port of ssh on hosts that name none")
    add("--venv_script", metavar="FILE", says="no effect for the environment that dsrun runs in; else refused")
    add("--log_level", default="info", choices=_LEVELS, says="error, critical: no notes of dsrun itself")
    add("-q", "--quiet", says="no notes of dsrun itself but errors", action="store_true")
    add("user_script", metavar="SCRIPT", says="script, module or program")
    add("user_args", nargs=argparse.REMAINDER, metavar="ARGS", says="words of the script")
    return parser


def _unknown(word: str) -> Problem:
    name = word.partition("=")[0]
    if name in _REMOVED:
        return Problem(f"deepspeed: `{name}` is not supported", _REMOVED[name])
    names = {option.lstrip("-"): option for option in _parser()._option_string_actions}  # pyright: ignore[reportPrivateUsage]  # no public list
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), names, 1)
    return Problem(f"deepspeed: there is no option `{name}`", f"did you mean `{names[close[0]]}`?" if close else _HELP)
