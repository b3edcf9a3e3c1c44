"""`dsrun run` as one rank of another launcher: `mpirun -n 2 dsrun train.py`, or the same below torchrun or srun.

Started once for each rank, dsrun would start all ranks in each. Instead each becomes the rank that it was started as:
the script is checked as ever, then run in this process's place. The other launcher supervises it; dsrun does not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dsrun.as_deepspeed.search_path import variables
from dsrun.as_deepspeed.version import wanted_version
from dsrun.contract.environment import JOB_ID_ENV, RankInfo
from dsrun.contract.foreign_ranks import find_foreign_rank
from dsrun.errors import InputError, Problem, UsageError

from ..agent.start.worker import exec_program
from ..plan.environment import job_environment, parse_env_options
from ..plan.launch_plan import Program, ProgramKind
from ..plan.program import check_program, find_program
from ..plan.script_args import split_script_words
from .checked_launch import NCCL_WITHOUT_GPU, NO_GPU_ENV, Backend
from .job_config import JobConfig, check_config

#: All of them: one alone may be left over in a shell.
_TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_of(environ: Mapping[str, str]) -> str | None:
    """Returns the name of the launcher that started this process as one of several ranks; None if none did.

    A rank of dsrun that runs dsrun wants a job of its own, as before it was a rank.

    Raises:
        InputError: what the launcher says of the rank is incomplete or no number in range.
    """
    if JOB_ID_ENV in environ:
        return None
    if all(environ.get(name) for name in _TORCHRUNS):
        if RankInfo.from_env(environ).world_size == 1:
            return None
        return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "another launcher"
    found = find_foreign_rank(environ)
    return None if found is None else found.launcher


def become_rank(
    launcher: str,
    words: Sequence[str],
    *,
    all_are_scripts: bool,
    kind: ProgramKind | None,
    as_deepspeed: bool,
    config: str | None,
    env: Sequence[str],
    backend: Backend | None,
    no_gpu: bool,
    environ: Mapping[str, str],
    quiet: bool,
) -> NoReturn:
    """Checks the launch, and runs the program in this process's place.

    Args:
        launcher: name of the other launcher, as `launcher_of` returns it.
        words: the script and everything after it.
        all_are_scripts: no word after the script is dsrun's.
        kind: kind of program that the user said it is; None means that the file decides.
        as_deepspeed: `import deepspeed` gives dsrun.
        config: `--config` from before the script.
        env: values of `--env`.
        backend: backend by which ranks talk; None leaves it to the script.
        no_gpu: the rank sees no GPU.
        environ: environment variables of this process.
        quiet: no notes.

    Raises:
        InputError: carries every problem of place, program, variables and config; or the program cannot be run.
    """
    rank = RankInfo.from_env(environ)
    ours = split_script_words(words[1:], all_are_scripts=all_are_scripts)
    asked, target = find_program(words[0], kind=kind)
    program = Program(kind=asked, target=target, args=ours.args, python=sys.executable)
    problems: list[Problem] = []
    user_env: dict[str, str] = {}
    if no_gpu and backend == "nccl":
        problems.append(NCCL_WITHOUT_GPU)
    checked = JobConfig()
    try:
        check_program(program, verbs=())
    except InputError as error:
        problems += error.problems
    try:
        user_env = parse_env_options(env, environ=environ)
    except InputError as error:
        problems += error.problems
    try:
        checked = check_config(config, ours, rank.world_size, environ)
    except InputError as error:
        problems += error.problems
    if problems:
        raise UsageError.of(problems)
    if rank.rank == 0 and not quiet:
        note = f"dsrun: {launcher} started {rank.world_size} ranks; each runs {words[0]}, and dsrun starts no others"
        print(*checked.warnings, note, sep="\n", file=sys.stderr, flush=True)
    ours_env = job_environment(user=user_env, config=checked.path, backend="gloo" if no_gpu else backend)
    given = {**environ, **ours_env, **(NO_GPU_ENV if no_gpu else {}), **rank.to_env()}
    if as_deepspeed:
        given |= variables(given, wanted_version(given))
    _, error = exec_program(program, {**given, "PYTHONUNBUFFERED": "1"})
    raise error
