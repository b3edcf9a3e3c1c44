"""Files that are either whole or absent, also after a power cut. Knows nothing of what is in them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .regular import refuse_other_kinds


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replaces `path` by `data` in one step.

    A reader sees the old bytes or the new ones, never a part. The data and the rename are on disk
    when this returns: file and folder are fsynced.

    Args:
        path: the file to replace; its folder must exist.
        data: the whole new content.
        mode: permission bits of the new file.

    Raises:
        NotRegularError: something else than a file has the name.
        OSError: the folder is missing, read-only or full; nothing was replaced.
    """
    refuse_other_kinds(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames and new names inside `folder` durable (fsync of the directory)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
