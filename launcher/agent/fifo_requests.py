"""Requests through a FIFO that another process of this host listens at: a byte each. Nothing here waits."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def request(path: Path) -> bool:
    """Sends one request.

    Args:
        path: place of the FIFO.

    Returns:
        whether somebody listens there.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode) and os.write(descriptor, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)


def open_requests(path: Path) -> int | None:
    """Makes the FIFO, or takes the one that is there, and opens it for reading.

    Args:
        path: place of the FIFO.

    Returns:
        descriptor, whose reads never meet an end; None where the folder takes no FIFO.
    """
    try:
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For writing too: whoever asked closes their end, and opening waits for nobody.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None
