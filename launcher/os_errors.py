"""What a machine's refusal means in words, with the limit to raise where one was reached. Pure."""

from __future__ import annotations

import errno
import os

#: What Python raises where no thread can be made; it says nothing of the reason, which is the limit.
_NO_THREAD = "can't start new thread"

_LIMITS = {errno.EMFILE: "ulimit -n", errno.EAGAIN: "ulimit -u"}


def refusal_of(error: OSError | RuntimeError) -> str | None:
    """Returns the refusal in words, or None where the error is no refusal of the machine but a fault of ours.

    Args:
        error: error of a system call, or of the start of a thread.
    """
    if isinstance(error, OSError):
        # Without a number it is in words of ours, with a path in it.
        words = error.strerror.lower() if error.strerror else str(error)
        if error.errno in _LIMITS:
            return f"{words}; raise `{_LIMITS[error.errno]}`"
        return words if error.filename is None else f"{os.fsdecode(error.filename)}: {words}"
    if str(error) != _NO_THREAD:
        return None
    return refusal_of(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
