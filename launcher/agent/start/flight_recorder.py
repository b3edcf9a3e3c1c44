"""torch's flight recorder in ranks: the variables that switch it on, and where a rank's dump and its pipe are.

Does not wait for a dump, and does not know what one says: that is for `stacks` and `nccl_dumps`.

[Note: flight recorder] Each rank keeps its last two thousand collectives in memory (about a megabyte; torch 2.11 and
later do so unasked) and writes them to a file, the dump, when NCCL's watchdog runs out of patience on any rank, and
when somebody writes a byte to its pipe. The pipe is a FIFO that the rank makes in its run folder when it joins its
first NCCL group. torch aborts the process where it cannot make it, so ranks are told of a pipe only where this host can
make one there, and programs that are no Python, which may be containers that see other folders, are not. torch 2.10
makes none without a variable that later versions warn of; its ranks leave dumps only when the watchdog ends them.

The names of variables are those of torch 2.10 and later; the older ones in brackets are read there too, with a warning,
so dsrun does not set them: TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE), TORCH_FR_DUMP_TEMP_FILE
(TORCH_NCCL_DEBUG_INFO_TEMP_FILE). What a user has set counts, in either name.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.environment import RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths, host_folder_prefix

from ...protocol import RankStack
from ..fifo_requests import request

#: Enough for some steps of a model with a hundred units; torch's own default.
BUFFER_ENTRIES = 2000
_SIZE_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE_NAME = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
#: Folders with dumps that a line names.
_MOST_PLACES = 4
#: The watchdog ends a rank about a minute after it had all dumps written; a file server's clock may be off.
_FRESH_NS = 600 * 10**9


@dataclass(frozen=True, slots=True)
class RecorderFiles:
    """Where one rank's recorder writes and listens.

    Attributes:
        dump: the file that it writes.
        pipe: FIFO on which the rank's recorder takes a request for a dump; None where it has none.
    """

    dump: Path
    pipe: Path | None

    def ask(self) -> bool:
        """Asks the rank for a dump; never waits. Returns whether somebody there listens.

        A rank without NCCL groups makes no pipe, and one that is gone does not listen at it.
        """
        return self.pipe is not None and request(self.pipe)

    def stamp(self) -> tuple[int, int]:
        """Returns what changes when the dump is written: its time in ns and its size; zeros where there is none."""
        try:
            found = self.dump.stat()
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_size)

    def read(self, *, most_bytes: int) -> bytes:
        """Returns the dump, or one byte more than may be read of it.

        Args:
            most_bytes: more is not read.

        Raises:
            OSError: there is none.
        """
        descriptor = os.open(self.dump, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a plain file")
            return file.read(most_bytes + 1)

    def is_fresh(self) -> bool:
        """Whether the dump was written in the last minutes: for the watchdog that ended this rank or a peer."""
        return self.stamp()[0] >= time.time_ns() - _FRESH_NS


def recorder_environment(given: Mapping[str, str], *, run_dir: str, attempt: int) -> dict[str, str]:
    """Returns what a rank gets for its recorder beside what it has; nothing that the user has set is touched.

    Args:
        given: the rank's environment so far.
        run_dir: the job's folder on its host.
        attempt: number of earlier starts of the job; each attempt has dumps of its own.
    """
    found = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"} if "TORCH_NCCL_DUMP_ON_TIMEOUT" not in given else {}
    if not any(name in given for name in _SIZE_NAMES):
        found[_SIZE_NAMES[0]] = str(BUFFER_ENTRIES)
    if not any(name in given for name in _DUMP_NAMES):
        found[_DUMP_NAMES[0]] = dump_prefix(given, run_dir=run_dir, attempt=attempt)
    return found


def dump_prefix(given: Mapping[str, str], *, run_dir: str, attempt: int) -> str:
    """Returns the path of a rank's dump but for the rank's number, which torch appends.

    Args:
        given: the rank's environment.
        run_dir: the job's folder on its host.
        attempt: number of earlier starts of the job.
    """
    own = str(JobPaths(Path(run_dir)).nccl_trace_prefix(attempt))
    return next((given[name] for name in _DUMP_NAMES if name in given), own)


def dump_places(
    stacks: Sequence[tuple[str, RankStack]], *, run_dir: str, job_id: str, own_names: Collection[str]
) -> list[str]:
    """Says where dumps are, a text for each folder in the order of ranks: a path of this machine bare, one of another
    host behind its name.

    Args:
        stacks: host and answer of each rank.
        run_dir: the job's folder; who sees it under this path shares it with this machine.
        job_id: the job, after which a host that does not share that folder calls its own.
        own_names: names of this machine.
    """
    places: dict[str, None] = {}
    for host, stack in sorted(stacks, key=lambda one: one[1].rank):
        if not stack.dump:
            continue
        prefix = f"{stack.dump.removesuffix(str(stack.rank))}<N>"
        is_here = host in own_names or prefix.startswith(f"{run_dir}/")
        kept = (
            " (until the attempt ends)"
            if os.path.basename(os.path.dirname(prefix)).startswith(host_folder_prefix(job_id))
            else ""
        )
        places[prefix if is_here else f"{host}:{prefix}{kept}"] = None
    shown = list(places)
    more = [f"and on {len(shown) - _MOST_PLACES} more hosts"] if len(shown) > _MOST_PLACES else []
    return [*shown[:_MOST_PLACES], *more]


def pipe_environment(given: Mapping[str, str], *, run_dir: str) -> dict[str, str]:
    """Returns the variable that gives ranks a pipe; nothing where the user has set it, or no pipe can be made.

    Args:
        given: environment that the ranks inherit.
        run_dir: the job's folder on this host; is written to.
    """
    if _PIPE_NAME in given:
        return {}
    paths = JobPaths(Path(run_dir))
    trial = paths.trial_pipe(secrets.token_hex(4))
    try:
        os.mkfifo(trial, 0o600)
        os.unlink(trial)
    except OSError:
        return {}
    return {_PIPE_NAME: str(paths.nccl_pipe_prefix)}


def without_outer(environ: Mapping[str, str], run_dir: str) -> dict[str, str]:
    """Returns an environment without the recorder's files of another job, in which this one may have been started.

    Args:
        environ: an environment.
        run_dir: folder of this job.
    """
    other = environ.get(RUN_DIR_ENV)
    if other is None or other == run_dir:
        return dict(environ)
    ours = (*_DUMP_NAMES, _PIPE_NAME)
    return {name: value for name, value in environ.items() if name not in ours or not value.startswith(f"{other}/")}


def recorder_files(environ: Mapping[str, str], rank: int) -> RecorderFiles:
    """Returns where a rank's recorder writes and listens.

    Args:
        environ: the rank's whole environment.
        rank: its number in the job.
    """
    dump = next(environ[name] for name in _DUMP_NAMES if name in environ)
    pipe = environ.get(_PIPE_NAME)
    return RecorderFiles(Path(f"{dump}{rank}"), Path(f"{pipe}{rank}.pipe") if pipe else None)
