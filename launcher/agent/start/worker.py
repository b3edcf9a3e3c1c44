"""One rank's process: its environment, its command, and the first steps after the fork.

Does not decide when ranks start or stop, and knows nothing of what the script does (that is bootstrap).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from dsrun.as_deepspeed.search_path import variables
from dsrun.contract.environment import (
    AS_DEEPSPEED_ENV,
    ERROR_FILE_ENV,
    JOB_ID_ENV,
    NONCE_ENV,
    PLANNED_AXES_ENV,
    RESUME_ENV,
    RUN_DIR_ENV,
    SAID_DEEPSPEED_ENV,
    STACKS_ENV,
    STDIN_RANK_ENV,
    take_local_rank_word,
)
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import InputError

from ... import processes
from ...isolated_command import isolated_command
from ...plan.environment import ORDER_ENV
from ...plan.launch_plan import LaunchPlan, NodePlan, Program, WorkerSpec
from ...process_modules import BOOTSTRAP
from .flight_recorder import recorder_environment, without_outer
from .own_rank import without_own_rank

#: Variables that ranks of a job do not take over from a rank of another one, in which their job was started.
_OF_ONE_JOB = (RESUME_ENV, SAID_DEEPSPEED_ENV, PLANNED_AXES_ENV)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Process of a rank that runs, as its host's agent sees it.

    Attributes:
        rank: global rank.
        local_rank: rank within the host.
        process: its own process, not those that it started.
    """

    rank: int
    local_rank: int
    process: psutil.Process


def node_environment(base: Mapping[str, str], plan: LaunchPlan, node: NodePlan) -> dict[str, str]:
    """Returns what all ranks of a host have in common; the spawner itself runs in it. See [Note: variables] in plan.

    Libraries read their variables when they are loaded (libgomp: OMP_NUM_THREADS), and forked ranks share the
    spawner's libraries. So what is equal for all ranks must be set before the spawner starts.
    """
    shared: dict[str, str] = dict(node.workers[0].env) if node.workers else {}
    for worker in node.workers[1:]:
        shared = {name: value for name, value in shared.items() if worker.env.get(name) == value}
    # Of a job that this one was started in; everything else that it was given there is given anew here. And dsrun's own
    # place in a step of Slurm, or below mpirun, is none of its ranks'.
    outer = without_own_rank(without_outer(base, plan.run_dir))
    inherited = {name: value for name, value in outer.items() if name not in _OF_ONE_JOB}
    resume = {} if plan.resume is None else {RESUME_ENV: plan.resume}
    job = {JOB_ID_ENV: plan.job_id, RUN_DIR_ENV: plan.run_dir, NONCE_ENV: plan.nonce}
    given = {**node.env, **inherited, **plan.env, **node.host.env, **shared, **job, **resume}
    version = plan.env.get(AS_DEEPSPEED_ENV)
    # This host's own folder: a path of the host that dsrun was started on may not be here.
    return given if version is None else {**given, **variables(given, version)}


def worker_environment(
    base: Mapping[str, str], plan: LaunchPlan, node: NodePlan, worker: WorkerSpec, *, address: str, port: int
) -> dict[str, str]:
    """Returns one rank's whole environment.

    Args:
        base: the agent's own environment.
        plan: the launch.
        node: the host.
        worker: the rank.
        address: address of the rendezvous store, where the ranks meet.
        port: its port.
    """
    paths = JobPaths(Path(plan.run_dir))
    place = plan.rank_info(worker, node, address=address, port=port, agent_store=True)
    given = {**node_environment(base, plan, node), **worker.env}
    return {
        # torch's own default: a NCCL error or time-out ends the process. torchrun's, 1, aborts the communicators before
        # that, which may hang as well.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # See [Note: numbers of GPUs] in gpu_order.
        ORDER_ENV: "PCI_BUS_ID",
        **recorder_environment(given, run_dir=plan.run_dir, attempt=plan.attempt),
        **given,
        **place.to_env(),
        "TORCHELASTIC_RUN_ID": plan.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(plan.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        ERROR_FILE_ENV: str(paths.error_file(worker.rank)),
        STACKS_ENV: str(paths.stacks(worker.rank)),
        STDIN_RANK_ENV: "" if plan.stdin_rank is None else str(plan.stdin_rank),
        "PYTHONUNBUFFERED": "1",
    }


def exec_command(program: Program) -> list[str]:
    """Returns the argv of a rank that is not forked."""
    if program.kind == "command":
        return [program.target, *program.args]
    return isolated_command(program.python, BOOTSTRAP, program.kind, program.target, *program.args)


def enter_worker(
    parent_pid: int, *, cwd: str, cpus: Sequence[int] | None, stdin_fd: int | None, stdout_fd: int, stderr_fd: int
) -> None:
    """Turns a process that was just forked into a rank's: own group, cores and streams, no inherited signal set-up.

    Args:
        parent_pid: the spawner.
        cwd: working folder.
        cpus: cores it may run on; None for those of the parent.
        stdin_fd: descriptor that the rank reads as its stdin; None for an empty stdin.
        stdout_fd: descriptor of the pipe's write end for stdout.
        stderr_fd: descriptor of the pipe's write end for stderr.

    Raises:
        InputError: the working folder cannot be entered, or a core not be used; the streams are set up, so it can be
            shown.
    """
    processes.die_with_parent(parent_pid, signal.SIGKILL)
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    # Also what a background job of a shell inherits as ignored (SIGINT): a rank must be stoppable.
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null if stdin_fd is None else stdin_fd, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
    os.close(null)
    if cpus is not None:
        _bind(cpus)
    try:
        os.chdir(cwd)
    except OSError as error:
        raise InputError(f"working folder: cannot enter {cwd!r} on this host: {error.strerror}") from error


def _bind(cpus: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        numbers = ",".join(map(str, cpus))
        reason = f"cores: this host does not let a rank run on CPUs {numbers}: {error.strerror}"
        raise InputError(reason, hint="start without binding: `--bind none`") from error


def exec_program(program: Program, environment: Mapping[str, str]) -> tuple[int, InputError]:
    """Replaces this process by the program; returns only if that fails.

    Returns:
        the exit code a shell would give (127 not found, 126 not executable), and the error to show.
    """
    given = dict(environment)
    if program.kind == "command":  # else `bootstrap` does it
        program = replace(program, args=(*take_local_rank_word(given), *program.args))
    words = exec_command(program)
    try:
        # The plan's PATH decides, as it would in a shell that had it.
        os.execvpe(words[0], words, given)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        if code == 127 and os.sep in words[0] and os.path.exists(words[0]):
            # The kernel's answer is about the interpreter that the first line names.
            return code, InputError(f"command: cannot run {words[0]!r}: the interpreter of its first line is not here")
        return code, InputError(f"command: cannot run {words[0]!r}: {error.strerror}")
