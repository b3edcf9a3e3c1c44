"""Reaching the front end of a job that another `dsrun` started: signalling exactly it, and waiting for its end.

Signals no rank and no agent: the front end acts on a request, and all limits and graces are its own.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Generator
from contextlib import contextmanager

from dsrun.errors import DsrunError, UsageError

from .record import JobRecord, ProcessMark


class FrontEndProcess:
    """The front end's process.

    Args:
        descriptor: its pidfd; None where it has ended.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def send(self, signum: int) -> bool:
        """Sends a signal; returns whether there was still somebody to get it."""
        if self._descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, signum)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the end of the process; returns whether it has ended.

        Args:
            timeout_s: the longest wait; None: however long it takes.
        """
        if self._descriptor is None:
            return True
        # poll, not select, which knows no descriptor above 1023.
        waiter = select.poll()
        waiter.register(self._descriptor, select.POLLIN)
        return bool(waiter.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


@contextmanager
def front_end_of(record: JobRecord) -> Generator[FrontEndProcess, None, None]:
    """Opens the front end of a job on this machine.

    Raises:
        UsageError: it runs on another host.
        DsrunError: it is another user's.
    """
    if record.host != os.uname().nodename:
        raise UsageError(
            f"job {record.id} runs on {record.host}, and this is {os.uname().nodename}",
            hint=f"`ssh {record.host} dsrun stop {record.id}`",
        )
    descriptor = _open(record.front_end)
    try:
        yield FrontEndProcess(descriptor)
    except PermissionError as error:
        raise DsrunError(f"job {record.id}: its front end (pid {record.front_end.pid}) is another user's") from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(mark: ProcessMark) -> int | None:
    """Returns a pidfd of this very process. It is opened before the mark is compared, see [Note: identity]."""
    try:
        descriptor = os.pidfd_open(mark.pid)
    except ProcessLookupError:
        return None
    if ProcessMark.of(mark.pid) == mark:
        return descriptor
    os.close(descriptor)
    return None
