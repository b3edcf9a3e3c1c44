"""The processes below this one: finding them by parentage, signalling exactly them, and dying with one's parent.

Linux only. Knows nothing of ranks or plans. Never signals by name or pattern, and never a pid that may have been
given to another process: see [Note: identity].

[Note: two reapers] Agent and spawner are both child subreapers, so a process that detaches itself (double fork,
setsid) becomes the child of one of them and is still found by parentage. If one of the two is killed, the other
ends everything; ranks also carry a parent-death signal, for the case that both are.

[Note: identity] A pid read from /proc may be recycled before a signal reaches it. So a pidfd is opened first, then the
process's start time is compared with the one that was listed, and the signal goes through the pidfd: whatever
the comparison saw is what gets the signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

import psutil

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process. See [Note: two reapers]."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Has the kernel send `signum` to this process when the thread that made it ends; survives exec.

    Args:
        parent_pid: pid that the parent must have. If the parent is another one, it died before the kernel was told, and
            the signal is raised here.
        signum: the signal.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def wake_up(_signum: int, _frame: FrameType | None) -> None:
    """Does nothing: with `signal.set_wakeup_fd`, a handler must exist for the signal to be seen."""


def outlive_user_signals() -> None:
    """Has this process take no notice of signals that mean something to ranks alone; programs it starts do not inherit.

    A scheduler sends them to every process of a job, and so to those between it and the ranks.
    """
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        # Not SIG_IGN, which would be inherited.
        signal.signal(signum, wake_up)


def descendants() -> list[psutil.Process]:
    """Returns every live process below this one; zombies, which nobody can end, are left out."""
    return [process for process in psutil.Process().children(recursive=True) if lives(process)]


def lives(process: psutil.Process) -> bool:
    """Whether this very process can still do anything; a zombie cannot."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, signum: int) -> None:
    """Signals this very process, if it still exists and is ours to signal. See [Note: identity]."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.is_running():
            signal.pidfd_send_signal(descriptor, signum)
    except ProcessLookupError:
        return
    except PermissionError:
        # It runs as another user (setuid). Who waits for its end sees that it does not come, and reports it.
        return
    finally:
        os.close(descriptor)


def catches(process: psutil.Process, signum: int) -> bool:
    """Whether the process has a handler for the signal; False if it has ended."""
    try:
        with open(f"/proc/{process.pid}/status", encoding="utf-8", errors="replace") as status:
            caught = next((line for line in status if line.startswith("SigCgt:")), None)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return caught is not None and bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def send_to_groups(groups: Iterable[int], signum: int) -> None:
    """Signals the descendants that are in one of these process groups."""
    wanted = set(groups)
    for process in descendants():
        try:
            group = os.getpgid(process.pid)
        except ProcessLookupError:
            continue
        if group in wanted:
            send(process, signum)


def reap() -> list[tuple[int, int]]:
    """Collects every child that has ended, without waiting.

    Returns:
        (pid, status) each; the status is an exit code or minus the signal's number.
    """
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def kill_descendants(*, patience_s: float) -> None:
    """Kills and reaps everything below this process; returns when nothing is left, or after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while (left := descendants()) and time.monotonic() < deadline_s:
        # In rounds: a process may have forked between the listing and its signal.
        for process in left:
            send(process, signal.SIGKILL)
        reap()
        # A killed process needs a moment to die; there is no event for a grandchild that is not ours to wait for.
        time.sleep(0.01)
    reap()
