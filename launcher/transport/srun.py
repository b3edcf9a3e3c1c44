"""Starts commands on the hosts of a Slurm job with Slurm's own `srun`: one step of one task for each.

Needs no login and no port of ours: Slurm's daemons start the task, pass its streams on, and end it with the job.

[Note: lines] Slurm passes a task's output on as soon as a line is whole, which a frame of the agent is. What rsync says
is no line and would be held back, so steps are `--unbuffered`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from dsrun.errors import LaunchError

from ..hosts.spec import HostSpec
from ..os_errors import refusal_of
from ..scheduler.slurm import step_gpus
from .base import STEP_PATIENCE_S, WAIT_LONGER
from .client_start import ClientStart, wait_for_start
from .login_line import MARK, Preamble
from .ssh.openssh import OpensshChannel

#: For the step to get its place, which other steps may hold against `--overlap` with `--exclusive`.
_PLACE_PATIENCE_S = 30

#: What the job was asked for, which srun would take for what this step is asked for; the options below say it all.
_OF_THE_JOB = re.compile(
    r"SLURM_(NTASKS|NPROCS|NNODES|NTASKS_PER_\w+|CPUS_PER_\w+|GPUS|GPUS_PER_\w+|GPU_BIND|GPU_FREQ|GRES|"
    r"TRES_\w+|MEM_\w+|CPU_BIND\w*|CPU_FREQ_REQ|CORE_SPEC|THREAD_SPEC|THREADS|THREADS_PER_CORE|HINT|DISTRIBUTION|"
    r"DIST_PLANESIZE|SPREAD_JOB|USE_MIN_NODES|EXACT|EXCLUSIVE|OVERCOMMIT|RESV_PORTS|CONSTRAINT|RESERVATION|SIGNAL|"
    r"TIMELIMIT|IMMEDIATE|DEPENDENCY|WAIT|KILL_BAD_EXIT|NO_KILL|EXPORT_ENV|MPI_TYPE|LABELIO|UNBUFFEREDIO|OPEN_MODE|"
    r"STD(IN|OUT|ERR)MODE|PROLOG|EPILOG|DEBUG|TEST_EXEC|BCAST\w*|REMOTE_CWD|WORKING_DIR)|SRUN_\w+"
)
#: A script that is always the same: no shell reads a word of the command. The mark tells the command's output from what
#: Slurm and the site's prologues print before it.
_SCRIPT = 'echo "$0"; echo "$0" >&2; exec "$@"'


class SrunTransport:
    """One srun, and one step of the job, a host.

    Args:
        environ: environment variables of this process, which tell srun its job and which the command inherits.
        start_patience_s: longest wait for Slurm to start the task, once the step has its place.
        program: srun.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] = os.environ,
        start_patience_s: float = STEP_PATIENCE_S,
        program: str = "srun",
    ) -> None:
        self._environ = environ
        self._patience_s = _PLACE_PATIENCE_S + start_patience_s
        self._program = program

    def start(self, host: HostSpec, argv: Sequence[str]) -> OpensshChannel:
        """Starts the command, and returns when it runs. See `Transport`.

        Args:
            host: a node of the job, by Slurm's name for it.
            argv: the command's words.

        Raises:
            LaunchError: there is no srun, or Slurm refuses, or does not start the command in time.
        """
        step = step_command(self._program, host.name, gpus=step_gpus(self._environ, host))
        words = [*step, "/bin/sh", "-c", _SCRIPT, MARK.decode().rstrip(), *argv]
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Out of reach of the terminal: Ctrl-C goes to the front end, which decides.
                start_new_session=True,
                env=step_environment(self._environ),
            )
        except OSError as error:
            raise LaunchError(
                f"host {host.name}: cannot run {self._program!r} here: {refusal_of(error)}",
                hint="inside a Slurm job its hosts are reached with srun; install Slurm's client, or use `-H FILE`",
            ) from error
        stdout, stderr = Preamble(), Preamble()
        try:
            _wait_for_start(process, stdout, stderr, host, patience_s=self._patience_s)
        except BaseException:
            process.kill()
            with process:
                raise
        return OpensshChannel(process, stdout.rest, stderr.rest)

    def close(self) -> None:
        """Keeps nothing. See `OwnedTransport`."""


def step_command(program: str, node: str, *, gpus: str | None) -> list[str]:
    """Returns the words of srun for one task on one node that takes nothing from the job's other steps.

    Args:
        program: srun.
        node: Slurm's name of it.
        gpus: option for those that the job has there, see `step_gpus`. Unless they are asked for, a step of one task
            gets what the job has asked for a task, or none of what came with `--exclusive`.
    """
    return [
        program,
        "--quiet",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        # Every step of the job may use all that the job has there: cores, memory and GPUs. Ranks are bound by dsrun.
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        *(() if gpus is None else (gpus, "--gpu-bind=none")),
        # Else ranks would take themselves for the one rank of an MPI job.
        "--mpi=none",
        # Over what the job was submitted with: `sbatch --export=NONE` is meant for the job's script.
        "--export=ALL",
        "--input=all",
        # Bytes as they come, not lines: rsync speaks none.
        "--unbuffered",
        f"--immediate={_PLACE_PATIENCE_S}",
    ]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for srun, which passes them on: without those that would change what the step gets."""
    return {name: value for name, value in environ.items() if _OF_THE_JOB.fullmatch(name) is None}


def _wait_for_start(
    process: subprocess.Popen[bytes], stdout: Preamble, stderr: Preamble, host: HostSpec, *, patience_s: float
) -> None:
    """Reads both streams until the command's own output begins."""
    match wait_for_start(process, stdout, stderr, patience_s=patience_s):
        case ClientStart.LATE:
            raise _refusal(
                host, f"Slurm has not started a step within {patience_s:g} s", stderr, more=f"; {WAIT_LONGER}"
            )
        case ClientStart.ENDED:
            raise _refusal(host, "srun has started nothing there", stderr)
        case ClientStart.STARTED:
            pass


def _refusal(host: HostSpec, what: str, stderr: Preamble, *, more: str = "") -> LaunchError:
    lines = [line.removeprefix("srun: ") for line in stderr.text.splitlines() if line]
    # Beside remarks on the cluster's configuration.
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = "; ".join(errors or lines)
    return LaunchError(
        f"host {host.name}: {what}{f': {said}' if said else ''}",
        hint=f"`srun --overlap --nodelist={host.name} hostname` in the same job shows it without dsrun{more}",
    )
