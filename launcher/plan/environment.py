"""Which variables all ranks of a job get beside the environment their agent was started in. Pure; RANK, cores and
devices are the business of others.

Nothing is overwritten but what is named here. Ranks of this machine inherit the environment dsrun was started in, but
for its own place among the ranks of another launcher (see own_rank); those of other hosts have what a login
there has, and of the one here what `passed_on` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsrun.contract.environment import (
    AS_DEEPSPEED_ENV,
    BACKEND_ENV,
    CONFIG_ENV,
    ERROR_FILE_ENV,
    GROUP_TIMEOUT_ENV,
    HEARTBEAT_ENV,
    JOB_ID_ENV,
    MEMORY_COPY_ENV,
    NONCE_ENV,
    PLANNED_AXES_ENV,
    RESUME_ENV,
    RUN_DIR_ENV,
    STACKS_ENV,
    RankInfo,
)
from dsrun.errors import Problem, UsageError

#: Threads of a rank; set on the rank's host, which knows its cores, unless the user has set it.
THREADS_ENV = "OMP_NUM_THREADS"
#: Which GPUs CUDA shows a process, and how it counts them.
VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
ORDER_ENV = "CUDA_DEVICE_ORDER"

#: Variables that say who a worker is: a user's value could only break the job.
RESERVED = frozenset(
    {
        *RankInfo().to_env(),
        *(AS_DEEPSPEED_ENV, CONFIG_ENV, BACKEND_ENV, JOB_ID_ENV, RUN_DIR_ENV, ERROR_FILE_ENV),
        *(RESUME_ENV, NONCE_ENV, HEARTBEAT_ENV, STACKS_ENV, MEMORY_COPY_ENV, GROUP_TIMEOUT_ENV, PLANNED_AXES_ENV),
    }
)
#: Beginnings of the variables that set up the libraries with which ranks talk and compute. Of the environment here,
#: ranks of other hosts get these too: jobs hang or differ where hosts do not agree. docs/decisions/0012 has why these.
LIBRARY_PREFIXES = (
    *("NCCL_", "OFI_", "FI_", "SHARP_", "UCX_", "NVSHMEM_", "GLOO_"),
    *("TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "NVTE_"),
    *("CUBLAS_", "CUBLASLT_", "CUDNN_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    "PYTHON",
)
_PASSED_NAMES = frozenset(
    {
        *("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
        *("CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE"),
    }
)
#: Folders are this machine's: where a library is installed or keeps its cache. torch's caches are put somewhere on
#: purpose, most often because a home folder has no room, which goes for all hosts.
_FOLDER_ENDINGS = ("_DIR", "_HOME", "_PATH", "_ROOT")
_FOLDERS_PASSED = ("TORCH", "PYTORCH_")
#: They say where this interpreter lives, which the other host knows better.
_NOT_PASSED = frozenset({"PYTHONHOME", "PYTHONEXECUTABLE", "PYTHONPLATLIBDIR", "PYTHONUSERBASE"})
#: What to do instead, where a user may want what the variable is for.
_INSTEAD = {
    AS_DEEPSPEED_ENV: "use `--as-deepspeed`",
    CONFIG_ENV: "use `--config FILE`",
    BACKEND_ENV: "use `--backend nccl` or `--backend gloo`",
    RUN_DIR_ENV: "`--log-dir DIR` says where the folders of jobs are",
    RESUME_ENV: "a job that is started again gets it (`--max-restarts N`); name a checkpoint in the script's words",
    MEMORY_COPY_ENV: "ranks get it where the job may be started again (`--max-restarts N`)",
    PLANNED_AXES_ENV: "write `pipeline.stages` and `tensor_parallel.autotp_size` in the config",
    GROUP_TIMEOUT_ENV: "`dsrun.init_distributed(timeout_s=...)` says how long ranks wait for each other",
    HEARTBEAT_ENV: "`--hang-timeout TIME` says when ranks that make no progress hang",
}


def parse_env_options(options: Sequence[str], *, environ: Mapping[str, str]) -> dict[str, str]:
    """Reads `--env K=V` and `--env K`.

    Args:
        options: values of `--env` in order; the last value for a name wins.
        environ: environment from which the value of a lone `K` is taken.

    Raises:
        UsageError: a name is empty, reserved, or not set in `environ`; carries all such problems.
    """
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for option in options:
        name, equals, value = option.partition("=")
        problem = _problem_with(name, copied=not equals, environ=environ)
        if problem is None:
            values[name] = value if equals else environ[name]
        else:
            problems.append(problem)
    if problems:
        raise UsageError.of(problems)
    return values


def instead_of(name: str) -> str | None:
    """Returns what to do instead of setting a variable that is dsrun's to set; None for all others."""
    return _INSTEAD.get(name, "use a name of your own") if name in RESERVED else None


def _problem_with(name: str, *, copied: bool, environ: Mapping[str, str]) -> Problem | None:
    if not name:
        return Problem("`--env` has no name", "write `--env NAME=VALUE`, or `--env NAME` to copy its value from here")
    if (instead := instead_of(name)) is not None:
        return Problem(f"`--env {name}` is dsrun's to set", instead)
    if copied and name not in environ:
        return Problem(f"`--env {name}` copies a variable that is not set here", f"write `--env {name}=VALUE`")
    return None


def interface_variables(interface: str, rails: Sequence[str] = ()) -> dict[str, str]:
    """Returns the variables by which ranks talk over interfaces of their host.

    Args:
        interface: its name.
        rails: names of all interfaces that NCCL's sockets may use; empty for `interface` alone. Gloo uses `interface`
            only.
    """
    # NCCL takes a bare name for the beginning of one: eth1 would mean eth10 too.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={','.join(rails or (interface,))}"}


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what ranks of other hosts get of the environment here unasked.

    Args:
        environ: the environment here.
    """
    outer = environ.get(RUN_DIR_ENV)
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(LIBRARY_PREFIXES) or name in _PASSED_NAMES)
        and name not in _NOT_PASSED | RESERVED
        and (not name.endswith(_FOLDER_ENDINGS) or name.startswith(_FOLDERS_PASSED))
        # A file in the folder of the job that this one was started in.
        and not (outer and value.startswith(f"{outer}/"))
    }


def counted_environ(environ: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment in which the GPUs of this machine are counted: what the job sets for its ranks counts.

    Args:
        environ: the environment here.
        given: variables that the job sets for all ranks.
    """
    return {**environ, **{name: given[name] for name in (VISIBLE_ENV,) if name in given}}


def threads_warnings(passed: Mapping[str, str], asked: Mapping[str, str]) -> tuple[str, ...]:
    """Says that a number of threads in this login's environment goes to the ranks of all hosts.

    Args:
        passed: variables of the environment here that other hosts get.
        asked: variables from `--env` and `--env-file`.
    """
    if THREADS_ENV not in passed or THREADS_ENV in asked:
        return ()
    value = passed[THREADS_ENV]
    return (
        f"warning: {THREADS_ENV}={value} of the environment here goes to the ranks of all hosts; `unset {THREADS_ENV}` "
        f"gives each its share of the cores, `--env {THREADS_ENV}` says that this is meant",
    )


def job_environment(
    *, user: Mapping[str, str], config: str | None, backend: str | None, as_deepspeed: str | None = None
) -> dict[str, str]:
    """Returns the variables all ranks of the job get.

    Args:
        user: variables from `--env` and `--env-file`, and those passed on from the environment here.
        config: absolute path of the checked config, if there is one.
        backend: `nccl` or `gloo` if the user asked for one.
        as_deepspeed: version of DeepSpeed that dsrun stands for; None where it does not. Each host finds the folder.
    """
    env = dict(user)
    if as_deepspeed is not None:
        env[AS_DEEPSPEED_ENV] = as_deepspeed
    if config is not None:
        env[CONFIG_ENV] = config
    if backend is not None:
        env[BACKEND_ENV] = backend
    return env
