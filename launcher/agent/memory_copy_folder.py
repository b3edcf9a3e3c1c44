"""The folder in a host's shared memory in which a job's ranks keep copies of their state. Reads and writes no copy.

[Note: copies in memory] They are of use to a further attempt alone, and nobody but dsrun would remove them. So ranks
get a folder only where the job may be started again. The agent removes it when its attempt ends, unless another one may
follow; then the front end has it removed when it has decided otherwise. An agent also removes those of other jobs of
this user that no agent holds, and nobody has touched for longer than there is between two attempts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from contextlib import suppress

from dsrun.contract.job_paths import memory_copies_prefix

_BASE = "/dev/shm"
#: Longer than the longest wait between two attempts and all that comes before ranks start.
_ABANDONED_S = 900.0


def copy_folder_of(job_id: str, node_rank: int) -> str | None:
    """Returns the path of the folder of one host of a job; None where a host has no shared memory to put it in."""
    return f"{_BASE}/{memory_copies_prefix(job_id)}{node_rank}" if os.access(_BASE, os.W_OK | os.X_OK) else None


class CopyFolderLock:
    """An agent's hold on the folder of its attempt.

    Args:
        path: path of the folder for copies in memory, as `copy_folder_of` returns it.

    Raises:
        OSError: it cannot be made, or is another user's.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(self._descriptor).st_uid != os.getuid():
            os.close(self._descriptor)
            raise PermissionError(f"{path} is another user's")
        # Shared: agents of two hosts may be on one machine, and the one before may still be about to end.
        fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def end(self, *, remove: bool) -> None:
        """Lets go of the folder.

        Args:
            remove: no further attempt will look into it.

        Raises:
            OSError: something of it cannot be removed.
        """
        try:
            if remove or not os.listdir(self.path):
                shutil.rmtree(self.path)
            else:
                os.utime(self._descriptor)  # from now on it may be abandoned
        finally:
            os.close(self._descriptor)


def remove_copies(job_id: str) -> list[OSError]:
    """Removes all folders of a job on this host; returns why some could not be removed."""
    return [error for path in _own_folders(memory_copies_prefix(job_id)) if (error := _remove(path)) is not None]


def remove_abandoned(*, now_s: float | None = None) -> list[OSError]:
    """Removes folders of this user's jobs that nobody goes on with; returns why some could not be removed.

    Args:
        now_s: seconds since the epoch.
    """
    now_s = time.time() if now_s is None else now_s
    return [
        error
        for path in _own_folders(memory_copies_prefix())
        if _is_abandoned(path, now_s) and (error := _remove(path)) is not None
    ]


def _own_folders(prefix: str) -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        for entry in os.scandir(_BASE):
            if entry.name.startswith(prefix):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                        found.append(entry.path)
    return found


def _is_abandoned(path: str, now_s: float) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone, or no folder any more
        return False
    try:
        if now_s - os.fstat(descriptor).st_mtime < _ABANDONED_S:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(path: str) -> OSError | None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None
