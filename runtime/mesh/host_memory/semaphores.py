"""Semaphores in memory that several processes see: counts which one raises and another waits for.

What was written before a semaphore was raised is seen by whoever has taken it, on every processor: POSIX.1-2017, 4.12.
"""

from __future__ import annotations

import ctypes
import os
import time

#: What a semaphore takes: a cache line of its own; glibc's has 32 bytes.
SEMAPHORE_BYTES = 64
#: Looks at a semaphore before this thread sleeps: about 50 us, less than falling asleep and waking up costs.
#: To yield in between gave the core away for whole slices on a busy machine.
_LOOKS = 100

_libc = ctypes.CDLL(None, use_errno=True)
# These return at once, so that giving up the interpreter's lock would cost more than they do.
_quick = ctypes.PyDLL(None, use_errno=True)

#: Raises the semaphore at an address by one.
raise_semaphore = _quick.sem_post


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def make_semaphore(address: ctypes.c_void_p) -> None:
    """Makes a semaphore of count 0 in memory that is shared."""
    if _quick.sem_init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init")


def try_semaphore(address: ctypes.c_void_p) -> bool:
    """Lowers the semaphore if it is above 0; returns whether it was."""
    return _quick.sem_trywait(address) == 0


def wait_for_semaphore(address: ctypes.c_void_p, *, nap_s: float) -> bool:
    """Lowers the semaphore once it is above 0, asleep until then; returns whether it was so within a nap.

    The nap goes by the clock on the wall, which may be set: let it be short.
    """
    wake_s = time.time() + nap_s
    until = _Timespec(int(wake_s), int(wake_s % 1 * 1e9))
    return _libc.sem_timedwait(address, ctypes.byref(until)) == 0


def looks_before_sleep(ranks: int) -> int:
    """Returns how often to look before sleeping, of so many ranks that wait for each other.

    Ranks that share cores would look while the one they wait for cannot run.
    """
    return _LOOKS if ranks <= (os.cpu_count() or 1) else 1
