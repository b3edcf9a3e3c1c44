"""The folder that a tracker's files go to, which one job writes at a time. Writes no scalars."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from .tracker import TrackedRun, TrackerProblem

#: Of a file system without locks: jobs are not told apart there.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})


class RunFolder:
    """The folder, held until it is let go or the process ends. It is made if need be.

    Two jobs that write at once would mix their rows, and take each other's files away.

    Args:
        run: The run.
        tracker: Name of the tracker: several of one job may have the same folder.

    Attributes:
        path: Path of the folder.

    Raises:
        TrackerProblem: another job writes there.
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, run: TrackedRun, *, tracker: str) -> None:
        self.path = Path(run.folder, run.options["output_path"], run.options["job_name"])
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / f".{tracker}.lock"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(descriptor, 200).decode(errors="replace") or "another job"
            self._close()
            raise TrackerProblem(f"{other} writes into {self.path}; give each job a `job_name` of its own") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"job {run.job_id}".encode(), 0)

    def let_go(self) -> None:
        """Lets another job write there."""
        self._close()
