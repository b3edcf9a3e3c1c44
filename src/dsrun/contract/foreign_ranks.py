"""Which rank this process is where another launcher started it: Open MPI, MPICH and its kin, jsrun, Flux, PALS, srun.

Reads variables only, and knows nothing of how ranks meet: `dsrun.contract.environment` puts a place in the job together
from it. Not for ranks of dsrun or torchrun: RANK says all about those.

[Note: port by hash] These launchers give their ranks no port to meet at. All ranks of a job know its id, so the port is
made of that: one of `FIRST_PORT` to `FIRST_PORT + PORTS - 1`, below those that the kernel gives away. Two jobs whose
first ranks share a host meet at the same port once in `PORTS` times, and something else may have it: MASTER_PORT
overrules it.

[Note: PMI of Slurm] Slurm's plugins for MPI set a part of what an MPI launcher sets, beside Slurm's own variables which
say everything: mpi/pmi2 sets PMI_RANK and PMI_SIZE and no local ones, mpi/cray_shasta up to Slurm 22.05 PALS_RANKID
alone, later ones all of PMI's. They stay in the environment of whatever a step of one task, a shell say, starts later,
`srun --mpi=none` among it, which does not take them away. So where a step of Slurm is there, and PMI's are incomplete
or bear the Slurm job's id, Slurm's own variables count.

[Note: left over] srun and sbatch pass the environment on that they were called in. So a task of srun that was started
from a `srun --pty` shell has that shell's SLURM_PTY_PORT, and a batch script that was submitted from a step has that
step's SLURM_STEP_*. srun sets SLURM_TASKS_PER_NODE to SLURM_STEP_TASKS_PER_NODE, unless `--preserve-env` asks it not
to; a batch script has 0 as SLURM_PROCID, SLURM_NODEID and SLURM_GTIDS, and the job's SLURM_TASKS_PER_NODE. Where that
is the step's too, and one task a node, nothing tells the script from the step's first task.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dsrun.errors import InputError

#: See [Note: port by hash].
FIRST_PORT, PORTS = 20000, 10000
#: Where nothing names the job: torchrun's port.
PLAIN_PORT = 29500

#: What names a job, for all its ranks alike and for no other job. The first that is set counts.
_JOB_IDS = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "FLUX_JOB_ID", "PALS_APID"),
    *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
)
#: Id of the step in which `salloc` runs its shell where a cluster has `LaunchParameters=use_interactive_step`.
_INTERACTIVE_STEP = str(0xFFFFFFFA)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRank:
    """A rank that another launcher started.

    Attributes:
        launcher: its name, for messages.
        rank: global rank.
        world_size: ranks of the job.
        local_rank: rank among those of this host.
        local_world_size: ranks of this host.
        node_rank: index of this host.
        node_count: hosts of the job.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int


@dataclass(frozen=True, slots=True)
class _Variables:
    """How one launcher calls what it tells its ranks; of several names, the first that is set counts.

    Attributes:
        launcher: its name, for messages.
        sign: variables that its ranks have, all of them.
        rank: global rank.
        size: ranks of the job.
        local_rank: rank on the host.
        local_size: ranks of the host.
        giving: words that start its ranks with MASTER_ADDR.
    """

    launcher: str
    sign: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    giving: str = "MASTER_ADDR=HOST mpiexec ..."


# Those that say more come first: Open MPI's ranks may have the variables of PMI and Slurm too, Cray's and Flux's those
# of PMI. Flux names no ranks of a host: see `_flux_rank`.
_LAUNCHERS = (
    _Variables(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "mpirun -x MASTER_ADDR=HOST ...",
    ),
    _Variables(
        "MVAPICH2",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        "jsrun",
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        "jsrun -E MASTER_ADDR=HOST ...",
    ),
    _Variables(
        "MPI",
        ("PMI_RANK", "MPI_LOCALRANKID"),
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID",),
        ("MPI_LOCALNRANKS",),
    ),
    _Variables(
        "Flux",
        ("FLUX_TASK_RANK",),
        ("FLUX_TASK_RANK",),
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        (),
        "flux run --env=MASTER_ADDR=HOST ...",
    ),
    _Variables(
        "PALS",
        ("PALS_RANKID",),
        ("PALS_RANKID",),
        ("PALS_SIZE", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _Variables(
        "MPI",
        ("PMI_RANK",),
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("PMI_LOCAL_RANK",),
        ("PMI_LOCAL_SIZE",),
    ),
)


def _in_terminal() -> bool:
    """Whether a terminal controls this process: it was started from a shell that people type into."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def find_foreign_rank(
    environ: Mapping[str, str], *, in_terminal: Callable[[], bool] = _in_terminal
) -> ForeignRank | None:
    """Returns which of several ranks this process is; None for one that no other launcher started, or alone.

    MPI says nothing of hosts: where Slurm does not, ranks are taken to fill one host after the other, as they do unless
    asked otherwise.

    Args:
        environ: environment variables of this process.
        in_terminal: whether a terminal controls this process.

    Raises:
        InputError: what the launcher says is incomplete, or is no number in range.
    """
    found = next((known for known in _LAUNCHERS if all(name in environ for name in known.sign)), None)
    if found is not None and not _is_slurms(found, environ):
        # One rank is none of several, however little else is said of it.
        if _number(environ, found.size, minimum=1) == 1:
            return None
        return _flux_rank(found, environ) if found.launcher == "Flux" else _read(found, environ)
    if is_task_of_many(environ, in_terminal=in_terminal):
        return _slurm_rank(environ)
    if found is None and environ.get("PMIX_RANK") and _number(environ, ("PMIX_RANK",)) > 0:
        raise InputError(
            f"environment: PMIX_RANK is {environ['PMIX_RANK']}, and no variable says how many ranks there are",
            hint="give the ranks RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start them with `dsrun`",
        )
    return None


def _is_slurms(found: _Variables, environ: Mapping[str, str]) -> bool:
    """Whether Slurm's own variables say who this process is, see [Note: PMI of Slurm]."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or found.launcher == "Flux":
        return False
    apid = environ.get("PALS_APID", "") if found.launcher == "PALS" else ""
    is_job = apid.partition(".")[0] == environ.get("SLURM_JOB_ID")
    return is_job or not all(any(name in environ for name in names) for names in (found.local_rank, found.local_size))


def is_task_of_many(environ: Mapping[str, str], *, in_terminal: Callable[[], bool] = _in_terminal) -> bool:
    """Whether this is one of several tasks of an `srun`; not so in a batch script or an interactive shell.

    Args:
        environ: environment variables of this process.
        in_terminal: whether a terminal controls this process.

    Raises:
        InputError: Slurm's variable holds no number.
    """
    if not in_step(environ) or "SLURM_PROCID" not in environ:
        return False
    if _number(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), default=1) <= 1:
        return False
    if environ["SLURM_PROCID"] != "0" or "SLURM_PTY_PORT" not in environ:
        return True
    # `srun --pty` gives its first task a terminal; what a shell there starts by another srun has none.
    return environ.get("SLURM_TASK_PID") == str(os.getpid()) or not in_terminal()


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a step of srun's, not in a batch script; see [Note: left over]."""
    if "SLURM_STEP_ID" not in environ:
        return False
    own, of_step = environ.get("SLURM_TASKS_PER_NODE"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    reads_as_script = all(environ.get(name) == "0" for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_GTIDS"))
    if own is None or of_step is None or not reads_as_script or in_interactive_step(environ):
        return True
    # SLURM_GTIDS names all tasks of the step on this node, of which its first one has so many.
    return own == of_step and re.match(r"1(?![0-9])", of_step) is not None


def in_interactive_step(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in the shell that `salloc` opens on a node, where a cluster is set up for that."""
    return environ.get("SLURM_STEP_ID") == _INTERACTIVE_STEP


def meeting_point(rank: ForeignRank, environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns address and port at which the ranks meet: MASTER_ADDR and MASTER_PORT where they are set.

    Args:
        rank: rank that this process is.
        environ: its variables.

    Raises:
        InputError: the ranks run on several hosts, and nothing says which is the first; or the port is none.
    """
    return _address(rank, environ), _port(environ)


def _address(rank: ForeignRank, environ: Mapping[str, str]) -> str:
    if given := environ.get("MASTER_ADDR"):
        return given
    if rank.local_world_size == rank.world_size:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST") if rank.launcher == "Slurm" else None
    if nodes := nodes or environ.get("SLURM_JOB_NODELIST"):
        return first_node(nodes)
    giving = next(
        (known.giving for known in _LAUNCHERS if known.launcher == rank.launcher), "MASTER_ADDR=HOST srun ..."
    )
    raise InputError(
        f"environment: {rank.launcher} started {rank.world_size} ranks on several hosts, "
        "and MASTER_ADDR does not say where the first one is",
        hint=f"name the host of rank 0: `{giving}`",
    )


def _port(environ: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environ:
        return _number(environ, ("MASTER_PORT",), minimum=1, maximum=65535)
    for name in _JOB_IDS:
        if job := environ.get(name):
            # A job of Slurm may start several programs, one after another or at once.
            step = environ.get("SLURM_STEP_ID", "") if name == "SLURM_JOB_ID" else ""
            digest = hashlib.sha256(f"{name}={job}.{step}".encode("utf-8", "surrogateescape")).digest()
            return FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS
    return PLAIN_PORT


def first_node(node_list: str) -> str:
    """Returns the first host of a list as Slurm writes it: `w00` of `w[00-15,20],x1`."""
    first = re.split(r",(?![^\[]*\])", node_list, maxsplit=1)[0]
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first)


def tasks_of_node(tasks_per_node: str, node: int) -> int:
    """Returns the number for one host out of what Slurm writes as `2(x3),1`.

    Raises:
        InputError: it is not written so, or says nothing of that host.
    """
    for item in tasks_per_node.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item)
        if match is None:
            break
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise InputError(f"environment: tasks per node are {tasks_per_node!r}; expected the likes of `2(x3),1`")


def _read(variables: _Variables, environ: Mapping[str, str]) -> ForeignRank:
    size = _number(environ, variables.size, minimum=1)
    rank = _number(environ, variables.rank, maximum=size - 1)
    local_size = _number(environ, variables.local_size, minimum=1, maximum=size)
    local_rank = _number(environ, variables.local_rank, maximum=local_size - 1)
    return ForeignRank(
        launcher=variables.launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=rank // local_size,
        node_count=-(-size // local_size),
    )


def _flux_rank(variables: _Variables, environ: Mapping[str, str]) -> ForeignRank:
    """Reads a task of `flux run`; Flux counts tasks and hosts of a job, and says of no host how many it has."""
    size = _number(environ, variables.size, minimum=1)
    count = _number(environ, ("FLUX_JOB_NNODES",), minimum=1, maximum=size)
    rank = _number(environ, variables.rank, maximum=size - 1)
    local_rank = _number(environ, variables.local_rank, maximum=size - 1)
    local_size = size // count
    if local_size * count != size:
        raise InputError(
            f"environment: Flux has {size} tasks on {count} hosts, and does not say how many each host has",
            hint=f"ask for as many on each: `flux run -N {count} --tasks-per-node={local_size + 1}`",
        )
    if local_rank != rank % local_size:
        raise InputError(
            f"environment: FLUX_TASK_RANK is {rank} and FLUX_TASK_LOCAL_ID {local_rank}: ranks do not fill one host "
            "after the other",
            hint="leave `--taskmap` out, or give the ranks RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )
    return ForeignRank(
        launcher=variables.launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=rank // local_size,
        node_count=count,
    )


def _slurm_rank(environ: Mapping[str, str]) -> ForeignRank:
    size = _number(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), minimum=1)
    count = _number(environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), minimum=1)
    node = _number(environ, ("SLURM_NODEID",), maximum=count - 1)
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    local_size = tasks_of_node(per_node, node)
    return ForeignRank(
        launcher="Slurm",
        rank=_number(environ, ("SLURM_PROCID",), maximum=size - 1),
        world_size=size,
        local_rank=_number(environ, ("SLURM_LOCALID",), maximum=local_size - 1),
        local_world_size=local_size,
        node_rank=node,
        node_count=count,
    )


def _number(
    environ: Mapping[str, str],
    names: tuple[str, ...],
    *,
    default: int | None = None,
    minimum: int = 0,
    maximum: int | None = None,
) -> int:
    """Reads the first of the variables that is set."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        if default is not None:
            return default
        raise InputError(
            f"environment: another launcher started this process, but {' or '.join(names)} is not set",
            hint="start the script with `dsrun`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )
    text = environ[name]
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise InputError(f"environment: {name} is {text[:200]!r}; expected a whole number")
    value = int(text)
    if value < minimum or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and at most {maximum}"
        raise InputError(f"environment: {name} is {value}; expected at least {minimum}{upper}")
    return value
