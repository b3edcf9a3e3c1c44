"""Which hosts the Slurm job gives that this process runs in, and how many ranks each takes. Variables in, hosts out.

Asks no daemon: all of it stands in the environment of a batch script, and of a shell that `salloc` has opened. Starts
nothing either: transport/srun does.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from dsrun.contract.environment import JOB_ID_ENV
from dsrun.contract.foreign_ranks import in_interactive_step, in_step, is_task_of_many, tasks_of_node
from dsrun.errors import HostfileError, InputError

from ..excerpts import Misread, quoted
from ..hosts.patterns import MAX_HOSTS, check_name, expand_names
from ..hosts.spec import MAX_SLOTS, HostSpec

_WAY_OUT = "name the hosts yourself with `-H FILE`, or run outside Slurm's job"
#: A list of names, cut where a comma stands outside brackets.
_BETWEEN_NAMES = re.compile(r",(?![^\[\]]*\])")


def job_id(environ: Mapping[str, str]) -> str | None:
    """Returns the id of the Slurm job that this process runs in; None outside of one."""
    return environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or None


def is_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this process is a Slurm job's batch script, or was started by it, in no step of srun's.

    So is none of dsrun's ranks, which SLURM_PROCID is kept from (see own_rank). A script that one has submitted has the
    variables of that rank, but is a job of its own.
    """
    return job_id(environ) is not None and "SLURM_PROCID" in environ and not in_step(environ)


def signal_names(environ: Mapping[str, str]) -> dict[int, str]:
    """Returns what notes call the signals that Slurm ends a job with, where this process is the job's batch script."""
    if not is_batch_script(environ):
        return {}
    return {signal.SIGTERM: "SIGTERM from Slurm (scancel, time limit or preemption)"}


def read_allocation(environ: Mapping[str, str]) -> tuple[HostSpec, ...] | None:
    """Returns the hosts of this Slurm job in its order.

    Slots are the GPUs that the job has on each, else the tasks that it was asked to run there, else one.

    Args:
        environ: environment variables of this process.

    Returns:
        None outside a job; in one of several tasks that an `srun` has started, for that is a rank itself; and in a rank
        of dsrun, whose hosts these are: what it starts runs beside it.

    Raises:
        HostfileError: what Slurm has set does not make sense, or makes a job that dsrun cannot serve.
    """
    job = job_id(environ)
    try:
        if job is None or is_task_of_many(environ) or (JOB_ID_ENV in environ and not is_batch_script(environ)):
            return None
        if environ.get("SLURM_HET_SIZE", "1") != "1":
            raise HostfileError(f"Slurm job {job} has components that differ, and dsrun serves one", hint=_WAY_OUT)
        names = _names(environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""), job)
        slots = _gpus(environ, names, job) or _tasks(environ, names) or [1] * len(names)
    except HostfileError:
        raise
    except InputError as error:
        raise HostfileError(f"Slurm job {job}: {error}", hint=_WAY_OUT) from error
    source = f"Slurm job {job}"
    return tuple(HostSpec(name=name, slots=count, source=source) for name, count in zip(names, slots, strict=True))


def _names(node_list: str, job: str) -> list[str]:
    names: list[str] = []
    try:
        for pattern in _BETWEEN_NAMES.split(node_list):
            names += map(check_name, expand_names(pattern))
            if len(names) > MAX_HOSTS:
                raise Misread(f"it names more than {MAX_HOSTS} hosts", _WAY_OUT)
    except Misread as error:
        raise HostfileError(
            f"Slurm job {job}: its list of nodes {quoted(node_list)} is not understood: {error.message}", hint=_WAY_OUT
        ) from error
    return names


def gpus_per_node(environ: Mapping[str, str]) -> int:
    """Returns the GPUs that this Slurm job has on the host of this process, or was to get on each; 0 if none are known.

    Raises:
        InputError: Slurm's variable holds no number.
    """
    here = environ.get("SLURM_GPUS_ON_NODE") or _ids(environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS"))
    return _count(here) if here else _typed_count(environ.get("SLURM_GPUS_PER_NODE", ""))


def step_gpus(environ: Mapping[str, str], host: HostSpec) -> str | None:
    """Returns the option by which a step sees all GPUs that this Slurm job has on a host; None for no GPU.

    Args:
        environ: environment variables of this process.
        host: a node of the job, by Slurm's name for it.

    Raises:
        InputError: Slurm's variables make no sense.
    """
    kinds = environ.get("SLURM_GPUS_PER_NODE", "").split(",")
    if len(kinds) > 1:
        # Of several types each has to be asked for: Slurm finds no `gpu:2` in `gpu:a100:1,gpu:v100:1`.
        return f"--gres={','.join(f'gpu:{kind}' for kind in kinds)}"
    node_list = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    job = job_id(environ) or "?"
    names = _names(node_list, job) if node_list else [host.name]
    try:
        counts = _gpus(environ, names, job)
    except _Unevenly:
        # The user has named the hosts, and with their slots how many GPUs each has.
        return f"--gpus={host.slots}"
    if counts is None:
        return None
    count = dict(zip(names, counts, strict=True)).get(host.name, counts[0])
    # Where they are spread unevenly, Slurm gives a step no `--gres` beyond what every node has (tried with 22.05).
    return f"--gpus={count}" if len(set(counts)) > 1 else f"--gres=gpu:{count}"


class _Unevenly(HostfileError):
    """GPUs are spread over the hosts, and nothing says how many each has."""


def _gpus(environ: Mapping[str, str], names: list[str], job: str) -> list[int] | None:
    """Returns the GPUs on each host; None where the job has asked for none, or not in words that say where they are."""
    here = gpus_per_node(environ)
    per_task = _typed_count(environ.get("SLURM_GPUS_PER_TASK", ""))
    if per_task and (tasks := _tasks(environ, names)) is not None:
        counts = [count * per_task for count in tasks]
        node = environ.get("SLURM_NODEID", "")
        if not here or (node.isdecimal() and int(node) < len(counts) and counts[int(node)] == here):
            return counts
    total = _typed_count(environ.get("SLURM_GPUS", ""))
    if total and total != here * len(names):
        if len(names) == 1:
            return [here or total]
        # Slurm has spread them as it could, and tells each host its own number only.
        known = f", {here} of them here" if here else ""
        raise _Unevenly(
            f"Slurm job {job} has {total} GPUs on {len(names)} hosts{known}: dsrun cannot tell how many each host has",
            hint="ask Slurm for `--gpus-per-node=N` in place of `--gpus=N`, or name hosts and GPUs with `-H FILE "
            "--transport srun`",
        )
    return [here] * len(names) if here else None


def _ids(text: str | None) -> str:
    """Turns ids, `0,1,2`, into their number."""
    return str(len(text.split(","))) if text else ""


def _typed_count(text: str) -> int:
    """Reads `2`, `a100:2` and `a100:2,v100:1`; 0 where it is written otherwise."""
    found = [re.fullmatch(r"(?:.*:)?([0-9]{1,6})", item) for item in text.split(",")]
    return sum(int(match[1]) for match in found if match is not None)


def _count(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,6}", text) is None or int(text) > MAX_SLOTS:
        raise InputError(f"environment: SLURM_GPUS_ON_NODE is {text[:200]!r}; expected a number of GPUs")
    return int(text)


def _tasks(environ: Mapping[str, str], names: list[str]) -> list[int] | None:
    """Returns the tasks that the job was asked to run on each host; None where nobody has said."""
    per_node = environ.get("SLURM_TASKS_PER_NODE", "")
    # Without `-n`, and in a shell that is a step itself, it holds a number that nobody asked for; but the shell that
    # `salloc` opens on a node keeps what the job was asked for.
    if per_node and "SLURM_NTASKS" in environ and (not in_step(environ) or in_interactive_step(environ)):
        return [tasks_of_node(per_node, node) for node in range(len(names))]
    asked = _typed_count(environ.get("SLURM_NTASKS_PER_NODE", ""))
    return [asked] * len(names) if asked else None
