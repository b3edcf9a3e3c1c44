"""The folder of a job's files on one host: the front end's where the host sees it, else one of the host's own.

Error files, stacks and records of the host's ranks lie there. A folder of its own is in the temporary folder, for this
user only, and lives as long as the attempt; what is worth keeping is sent to the front end. Does not read those files.

[Note: mark] Two machines may have the same path for different folders, so a folder of the right name proves nothing.
The front end leaves a file of a name that nobody can guess in its folder for as long as an attempt runs. Who finds it
there, and may write there, shares the folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.job_paths import JobPaths, host_folder_prefix, mark_name


@dataclass(frozen=True, slots=True)
class HostFolder:
    """Where a job's files are on this host.

    Attributes:
        path: the folder; it exists.
        is_own: nobody else sees it, and this host removes it.
    """

    path: str
    is_own: bool

    def put(self, name: str, text: str) -> str:
        """Writes a file that is not there yet, for this user only; returns its path.

        Args:
            name: name of the file within the folder.
            text: decoded with `surrogateescape`.

        Raises:
            OSError: it cannot be written.
        """
        path = os.path.join(self.path, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
        return path

    def remove(self) -> None:
        """Removes the folder if it is the host's own.

        Raises:
            OSError: something of it cannot be removed.
        """
        if self.is_own:
            shutil.rmtree(self.path)


@contextmanager
def marked(run_dir: str) -> Generator[str]:
    """Leaves a mark in the front end's folder; see [Note: mark].

    Yields:
        the mark, for the hosts to look for; empty where the folder takes no file, so that nobody can share it.
    """
    mark = mark_name(secrets.token_hex(16))
    path = JobPaths(Path(run_dir)).mark(mark)
    try:
        path.touch(mode=0o600, exist_ok=False)
    except OSError:
        # Not the end of a job that could run; whoever writes its logs says what is wrong with the folder.
        yield ""
        return
    try:
        yield mark
    finally:
        path.unlink(missing_ok=True)


def find_or_make(run_dir: str, mark: str, job_id: str) -> HostFolder:
    """Returns this host's folder of a job, and makes it where it does not share the front end's.

    Args:
        run_dir: the front end's.
        mark: name of the file that the front end left in `run_dir` as a mark, see `marked`; empty for none.
        job_id: the job.

    Raises:
        OSError: it cannot be made.
    """
    if mark and os.path.isfile(JobPaths(Path(run_dir)).mark(mark)) and os.access(run_dir, os.W_OK | os.X_OK):
        return HostFolder(run_dir, is_own=False)
    return HostFolder(tempfile.mkdtemp(prefix=host_folder_prefix(job_id)), is_own=True)


def remove_left(job_id: str) -> list[OSError]:
    """Removes folders that this host made for a job of this user, once nothing of the job runs here any more.

    Args:
        job_id: the job.

    Returns:
        why some could not be removed.
    """
    refusals: list[OSError] = []
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(host_folder_prefix(job_id)):
            continue
        try:
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                shutil.rmtree(entry.path)
        except OSError as error:
            refusals.append(error)
    return refusals
