"""Folders for files that nobody shall take for a checkpoint: hidden, and gone in the end, also after a kill.

[Note: scratch folders] Each has a file that its maker holds a lock on. A process that was killed holds none, so whoever
makes the next one beside it removes what it left. On a file system without locks it stays until somebody removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..storage.calls import is_locked_elsewhere

_LOCK = "lock"


@contextmanager
def scratch_folder(parent: Path, label: str) -> Generator[Path]:
    """Yields a new folder, and removes it; see [Note: scratch folders].

    Args:
        parent: folder that it is made in.
        label: word for its purpose, a part of its name.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f".dsrun-{label}-"
    _remove_left(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        unlocked = folder / f".{_LOCK}"
        with unlocked.open("xb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(folder / _LOCK)  # under this name it was never free
            yield folder
    finally:
        shutil.rmtree(folder)


def _remove_left(parent: Path, prefix: str) -> None:
    """Removes the folders of processes that were killed."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it is being made, or removed
            continue
        try:
            if is_locked_elsewhere(descriptor) is False:
                shutil.rmtree(folder, ignore_errors=True)  # another process removes it as well
        finally:
            os.close(descriptor)
