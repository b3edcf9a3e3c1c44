"""How one sees whether a job's front end lives: a lock that dies with it. Writes nothing into the file.

[Note: job lock] The front end holds a lock on `job.lock` as long as it lives, and the kernel lets go of it however the
front end ends. So a job runs while its lock is held, has ended once there is an outcome, and has crashed if neither is
true. The outcome is written before the lock is let go; who looks must ask for the lock first.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import UsageError
from dsrun.files.regular import open_regular


class JobLock:
    """Shows that the front end lives, until it is let go or the process ends. See [Note: job lock].

    Args:
        folder: the job's.

    Raises:
        UsageError: the folder's file system has no locks, or cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        path = JobPaths(folder).lock
        try:
            # Locked before it has its name: nobody ever sees it free while the front end lives.
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(name, path)
            except OSError:
                os.unlink(name)
                os.close(descriptor)
                raise
        except OSError as error:
            raise UsageError(
                f"job folder {folder}: cannot be locked: {(error.strerror or str(error)).lower()}",
                hint="name another place with `--log-dir DIR`",
            ) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets go; the job must have its outcome by then."""
        os.close(self._descriptor)


def is_locked(folder: Path) -> bool:
    """Whether the job's front end lives, on whatever host. See [Note: job lock]."""
    try:
        descriptor = open_regular(JobPaths(folder).lock)
    except OSError:
        return False
    try:
        # Shared, so that two who ask at once do not take each other for the front end.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
