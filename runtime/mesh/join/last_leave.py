"""Destroys a default group that NCCL serves when the program is over, and keeps a rank for a few seconds at most.

Without it each rank of a script that has no `destroy_process_group` prints torch's warning of that, and what NCCL has
under way on the network goes with the first process that ends. Destroying waits for the collectives that this rank has
enqueued, and for the host's other ranks to do the same; there is no way to leave that waits for nobody and loses
nothing (an abort drops what is under way). So a thread does it, whose end is waited for with patience: ranks end at
about the same time, or hang, and then the process ends as it would have without.

A rank that has failed leaves nothing: the others may be in collectives, and would be waited for in vain.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from dsrun.contract.environment import ERROR_FILE_ENV, LEAVING_THREAD

#: Longest wait for the other ranks.
PATIENCE_S = 5.0


class Axis(Protocol):
    """What is asked of collectives before their groups go; `C10dCollectives` has it."""

    def becomes_idle(self, *, patience_s: float) -> bool:
        """Returns whether nothing is under way any more, which is waited for a while."""
        ...

    def close(self) -> None:
        """Lets go of the groups."""
        ...


class LastLeave:
    """A thread that destroys the default group when it is told to; made before exit, for then Python 3.12 makes none.

    Args:
        patience_s: longest that the end of the process waits for it.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._axes: list[Axis] = []
        self._is_time = threading.Event()
        self._is_wanted = True
        self._thread = threading.Thread(target=self._destroy, name="dsrun-last-leave", daemon=True)
        self._thread.start()

    def add(self, axes: Sequence[Axis]) -> None:
        """Says what is on the group until the process ends."""
        self._axes += axes

    def at_exit(self) -> None:
        """Destroys the default group, unless this rank has failed, or dsrun's launcher is about to do it."""
        if _has_failed():
            return
        if any(thread.name == LEAVING_THREAD for thread in threading.enumerate()):
            for axis in self._axes:
                axis.close()
            return
        self._is_time.set()
        self._thread.join(self._patience_s)

    def cancel(self) -> None:
        """Ends the thread: the group has been left before."""
        self._is_wanted = False
        self._is_time.set()

    def _destroy(self) -> None:
        self._is_time.wait()
        if not self._is_wanted or not dist.is_initialized():
            return
        if all(axis.becomes_idle(patience_s=self._patience_s) for axis in self._axes):
            for axis in self._axes:
                axis.close()
            dist.destroy_process_group()


def _has_failed() -> bool:
    """Whether an exception has ended the program: python has shown it, or a launcher has been left word of it."""
    error_file = os.environ.get(ERROR_FILE_ENV)
    return hasattr(sys, "last_value") or (error_file is not None and os.path.exists(error_file))
