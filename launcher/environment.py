"""Which variables workers get on top of the environment dsrun was started in. Pure; RANK and kin are made elsewhere.

Nothing is taken away, and nothing overwritten but what is named here: CUDA_VISIBLE_DEVICES, PYTHONPATH and NCCL_*
pass as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsrun.contract import BACKEND_ENV, CONFIG_ENV, ERROR_FILE_ENV, JOB_ID_ENV, RUN_DIR_ENV, RankInfo
from dsrun.errors import Problem, UsageError

from .secrets_mask import masked as masked

THREADS_ENV = "OMP_NUM_THREADS"

#: Variables that say who a worker is: a user's value could only break the job.
RESERVED = frozenset({*RankInfo().to_env(), CONFIG_ENV, BACKEND_ENV, JOB_ID_ENV, RUN_DIR_ENV, ERROR_FILE_ENV})


def parse_env_options(options: Sequence[str], *, environ: Mapping[str, str]) -> dict[str, str]:
    """Reads `--env K=V` and `--env K`.

    Args:
        options: what was given, in order; the last value for a name wins.
        environ: where the value of a lone `K` comes from.

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


def _problem_with(name: str, *, copied: bool, environ: Mapping[str, str]) -> Problem | None:
    if not name:
        return Problem("`--env` has no name", "write `--env NAME=VALUE`, or `--env NAME` to copy its value from here")
    if name == CONFIG_ENV:
        return Problem(f"`--env {name}` is dsrun's to set", "use `--config FILE`")
    if name == BACKEND_ENV:
        return Problem(f"`--env {name}` is dsrun's to set", "use `--backend nccl` or `--backend gloo`")
    if name in RESERVED:
        return Problem(f"`--env {name}` is dsrun's to set", "use a name of your own")
    if copied and name not in environ:
        return Problem(f"`--env {name}` copies a variable that is not set here", f"write `--env {name}=VALUE`")
    return None


def job_environment(*, user: Mapping[str, str], config: str | None, backend: str | None) -> dict[str, str]:
    """Returns the variables all ranks of the job get.

    Args:
        user: from `--env`.
        config: absolute path of the checked config, if there is one.
        backend: `nccl` or `gloo` if the user asked for one.
    """
    env = dict(user)
    if config is not None:
        env[CONFIG_ENV] = config
    if backend is not None:
        env[BACKEND_ENV] = backend
    return env


def thread_environment(*, usable_cores: int, local_ranks: int, given: Mapping[str, str]) -> dict[str, str]:
    """Shares the cores of a host among its ranks.

    PyTorch starts one thread a core in every rank unless told otherwise; ranks that each do so stall one another.

    Args:
        usable_cores: cores this job may use, not the cores there are.
        local_ranks: ranks on the host.
        given: what the ranks will see already; a value the user set is kept.
    """
    if THREADS_ENV in given:
        return {}
    return {THREADS_ENV: str(max(1, usable_cores // local_ranks))}
