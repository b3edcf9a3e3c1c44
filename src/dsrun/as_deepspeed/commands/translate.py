"""Words of `deepspeed` as words of `dsrun run`, and what there is to say about it. Starts and reads nothing.

What has no meaning for dsrun is left out with a note; what dsrun cannot do is refused with the way out. Where the two
would start ranks in different places, DeepSpeed's way is taken, see [Note: the only host].

[Note: the only host] DeepSpeed starts the ranks of a job with one host on the machine that it is called on, whatever
the host's name; `--force_multi` has it reached over the network. Both mean the same here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.environment import LOCAL_RANK_WORD_ENV
from dsrun.errors import HostfileError, Problem, UsageError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.number_ranges import numbers_of
from dsrun.launcher.plan.selection import is_local, select

from .options import HOSTFILE, MASTER_PORT, NO_LOG, Options

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MPI = ("openmpi", "mvapich", "mpich", "impi")
_LAUNCHERS = ("pdsh", "slurm", *_MPI)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is there besides the words.

    Attributes:
        hosts: hosts of the hostfile; None where there is no such file.
        local_names: names of this machine, in lower case.
        in_job: whether a scheduler's job gives hosts unasked.
        environ: environment of the command.
        python_folder: folder of the interpreter that runs dsrun.
        exported: names of the variables that `.deepspeed_env` gives ranks of all hosts, which are set in this process.
    """

    hosts: tuple[HostSpec, ...] | None
    local_names: Collection[str]
    in_job: bool
    environ: Mapping[str, str]
    python_folder: Path
    exported: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What is to be done.

    Attributes:
        words: words after `dsrun`.
        notes: lines to say, without a beginning.
        cores: cores that this process keeps to, and so all ranks; None for those that it has.
        unset: variables that this process takes out of its environment.
        quiet: whether errors alone are to be said.
        exports: whether ranks get the variables of `.deepspeed_env`.
    """

    words: tuple[str, ...]
    notes: tuple[str, ...]
    cores: tuple[int, ...] | None = None
    unset: tuple[str, ...] = ()
    quiet: bool = False
    exports: bool = False


def translate(options: Options, around: Surroundings) -> Translation:
    """Translates a command.

    Args:
        options: words as they were typed.
        around: surroundings: what is there besides the words.

    Raises:
        UsageError: carries everything that dsrun cannot do.
        HostfileError: the filter or the counts ask for what is not in the hostfile.
    """
    chosen = _chosen_hosts(options, around)
    several = chosen is not None and (len(chosen) > 1 or options.force_multi) and not options.no_ssh
    static = options.no_ssh and (len(chosen) > 1 if chosen is not None else options.num_nodes > 1)
    problems = list(_refused(options, around, several=several))
    if static:
        problems += _static_problems(options, chosen)
    elif options.no_ssh and options.node_rank > 0:
        problems.append(
            Problem(
                f"deepspeed: `--node_rank {options.node_rank}` of one node",
                "`--hostfile FILE`, or `--num_nodes N` with `--master_addr`, says how many there are",
            )
        )
    if problems:
        raise UsageError.of(problems)
    ignored = [] if chosen is not None or not (options.include or options.exclude) else [_VISIBLE]
    unset = tuple(name for name in ignored if around.environ.get(name))
    where = _static_words(options, chosen) if static else _placed_words(options, around, chosen=chosen, several=several)
    words = ["run", "--as-deepspeed", *where, *_rank_words(options)]
    if several:
        words += [word for name in around.exported for word in ("--env", name)]
    if not options.no_local_rank:
        words += ["--env", f"{LOCAL_RANK_WORD_ENV}=--local_rank"]
    return Translation(
        words=(*words, options.user_script, *options.user_args),
        notes=tuple(_notes(options, around, chosen=chosen, several=several, static=static)),
        cores=_cores(options),
        unset=unset,
        quiet=_is_quiet(options),
        exports=several,
    )


def _chosen_hosts(options: Options, around: Surroundings) -> tuple[HostSpec, ...] | None:
    if around.hosts is None:
        return None
    try:
        selected = select(
            around.hosts,
            include=options.include or None,
            exclude=options.exclude or None,
            nodes=_count(options.num_nodes),
            ranks_per_host=_count(options.num_gpus),
        )
    except HostfileError as error:
        raise HostfileError.of(
            [Problem(_as_typed(one.message), one.hint and _as_typed(one.hint)) for one in error.problems]
        ) from error
    return selected.hosts


def _as_typed(text: str) -> str:
    """Returns a message with the options that the user knows."""
    return text.replace("`--nodes", "`--num_nodes").replace("`-n", "`--num_gpus")


def _count(number: int) -> int | None:
    return number if number > 0 else None


def _refused(options: Options, around: Surroundings, *, several: bool) -> Iterator[Problem]:
    """Yields what dsrun cannot do."""
    if options.autotuning:
        yield Problem(
            f"deepspeed: `--autotuning {options.autotuning}` is not supported",
            "`dsrun plan --fit MODEL` prints the fastest config that fits",
        )
    if options.launcher.lower() not in _LAUNCHERS:
        yield Problem(f"deepspeed: `--launcher {options.launcher}`; expected one of {', '.join(_LAUNCHERS)}")
    if several and options.launcher_args:
        yield Problem(
            f"deepspeed: `--launcher_args` is for {options.launcher}, which dsrun does not start",
            "what ssh needs stands in ssh_config, and variables for all ranks in `.deepspeed_env`",
        )
    if several and options.venv_script and not _is_own_environment(options.venv_script, around.python_folder):
        yield Problem(
            f"deepspeed: `--venv_script {options.venv_script}`: no script is run on the hosts, which all use "
            f"{around.python_folder}",
            "start `deepspeed` in that environment, or name a host's interpreter with `python=PATH` in the hostfile",
        )
    if options.bind_core_list is not None and options.bind_cores_to_rank:
        if several:
            yield Problem(
                f"deepspeed: `--bind_core_list {options.bind_core_list}`: dsrun cannot say so to other hosts",
                "leave it out: `--bind_cores_to_rank` shares out the cores that each host has",
            )
        if re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", options.bind_core_list) is None:
            yield Problem(f"deepspeed: `--bind_core_list {options.bind_core_list}`; expected cores like `0-3,8`")
    if options.module and options.no_python:
        yield Problem("deepspeed: `--module` and `--no_python` exclude each other", "leave one of them out")


def _is_own_environment(script: str, python_folder: Path) -> bool:
    """Whether a script, by its place, switches to the environment that dsrun runs in: venv puts them side by side."""
    return Path(script).expanduser().absolute().parent == python_folder


def _static_problems(options: Options, chosen: Sequence[HostSpec] | None) -> Iterator[Problem]:
    nodes = options.num_nodes if chosen is None else len(chosen)
    if not 0 <= options.node_rank < nodes:
        yield Problem(
            f"deepspeed: `--no_ssh` of {nodes} nodes with `--node_rank {options.node_rank}`; expected 0 to {nodes - 1}",
            "each node gives its own; the first one is 0",
        )
    if chosen is None and not options.master_addr:
        yield Problem("deepspeed: `--no_ssh` without a hostfile or `--master_addr`", "one of them says where node 0 is")
    if chosen is not None and len({host.slots for host in chosen}) > 1:
        ranks = ", ".join(f"{host.name} has {host.slots}" for host in chosen)
        yield Problem(
            f"deepspeed: `--no_ssh` with different numbers of ranks: {ranks}",
            "take equally many of each with `--include`, or start all from one host, without `--no_ssh`",
        )


def _static_words(options: Options, chosen: Sequence[HostSpec] | None) -> list[str]:
    """Returns words that start the ranks of one node of several."""
    nodes, ranks, address = options.num_nodes, _count(options.num_gpus), options.master_addr
    gpus: tuple[int, ...] | None = None
    if chosen is not None:
        here = chosen[options.node_rank]
        nodes, ranks, address, gpus = len(chosen), here.slots, address or chosen[0].address, here.gpus
    words = ["--nodes", str(nodes), "--node-rank", str(options.node_rank), "--master-addr", address]
    words += ["--master-port", str(options.master_port)]
    words += [] if ranks is None else ["-n", str(ranks)]
    if gpus is not None and gpus != tuple(range(len(gpus))):
        words += ["--env", f"{_VISIBLE}={','.join(map(str, gpus))}"]
    return words


def _placed_words(
    options: Options, around: Surroundings, *, chosen: Sequence[HostSpec] | None, several: bool
) -> list[str]:
    """Returns words that say where the ranks are, as all of them are started from here."""
    words: list[str] = []
    if chosen is not None:
        words += ["--hostfile", options.hostfile]
    words += ["--include", options.include] if options.include else []
    words += ["--exclude", options.exclude] if options.exclude else []
    if options.num_nodes > 0:
        words += ["--nodes", str(options.num_nodes)]
    elif chosen is None and around.in_job and not (options.include or options.exclude):
        words += ["--nodes", "1"]
    words += ["--ranks-per-host", str(options.num_gpus)] if options.num_gpus > 0 else []
    if several:
        words += ["--transport", "srun"] if options.launcher.lower() == "slurm" else []
        words += ["--ssh-port", str(options.ssh_port)] if options.ssh_port is not None else []
        words += ["--no-preflight"] if options.no_ssh_check else []
    elif chosen is not None and not _is_here(chosen[0], around):
        words += ["--transport", "local"]
    return words


def _is_here(host: HostSpec, around: Surroundings) -> bool:
    return is_local(host.name, local_names=frozenset(around.local_names))


def _rank_words(options: Options) -> list[str]:
    words = ["--bind", "cores"] if options.bind_cores_to_rank else []
    words += ["--log-dir", options.enable_each_rank_log] if options.enable_each_rank_log != NO_LOG else []
    words += ["--module"] if options.module else []
    words += ["--no-python"] if options.no_python else []
    words += ["--quiet"] if _is_quiet(options) else []
    return words


def _is_quiet(options: Options) -> bool:
    return options.quiet or options.log_level in ("error", "critical")


def _cores(options: Options) -> tuple[int, ...] | None:
    if options.bind_core_list is None or not options.bind_cores_to_rank:
        return None
    return tuple(numbers_of(options.bind_core_list))


def _notes(
    options: Options, around: Surroundings, *, chosen: Sequence[HostSpec] | None, several: bool, static: bool
) -> Iterator[str]:
    """Yields what is left out, and what is not as it may be expected."""
    if around.hosts is None and options.hostfile != HOSTFILE:
        yield f"--hostfile {options.hostfile}: there is no such file; ranks run on this machine alone"
    if chosen is not None and not several and not static and not _is_here(chosen[0], around):
        yield (
            f"{chosen[0].name}, the only host, is taken for this machine, as DeepSpeed does; --force_multi reaches it"
        )
    given = {"--master_addr": options.master_addr != "", "--master_port": options.master_port != MASTER_PORT}
    if not static and any(given.values()):
        yield f"{', '.join(name for name, there in given.items() if there)}: left out; ranks meet by themselves"
    if options.node_rank >= 0 and not options.no_ssh:
        yield "--node_rank: left out; it counts with --no_ssh"
    if several and options.launcher.lower() in _MPI:
        yield f"--launcher {options.launcher}: dsrun uses no MPI; hosts are reached over ssh"
    if not several:
        unused = {
            "--launcher_args": options.launcher_args != "",
            "--ssh_port": options.ssh_port is not None,
            "--no_ssh_check": options.no_ssh_check,
            "--venv_script": options.venv_script is not None,
        }
        if any(unused.values()):
            yield f"{', '.join(name for name, there in unused.items() if there)}: left out; no other host is reached"
    if options.force_multi and chosen is None:
        yield "--force_multi: left out; there is no hostfile"
    if options.bind_core_list is not None and not options.bind_cores_to_rank:
        yield "--bind_core_list: left out; it counts with --bind_cores_to_rank"
    if options.save_pid:
        yield "--save_pid: left out; `dsrun ps` lists jobs, and `dsrun show JOB` their processes"
    if chosen is None and around.environ.get(_VISIBLE):
        value = around.environ[_VISIBLE]
        if options.include or options.exclude:
            yield f"{_VISIBLE}={value} is ignored, as by DeepSpeed: the filter counts all GPUs of this machine"
        elif options.num_gpus > 0:
            yield f"{_VISIBLE}={value} is obeyed beside --num_gpus; DeepSpeed would take the first GPUs of the machine"
