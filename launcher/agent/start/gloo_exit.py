"""Lets go of torch.distributed's groups after a program that has ended well, before the interpreter ends.

A Gloo thread that still holds a collective's tensors then needs the interpreter's lock to free them. If the interpreter
has begun to end, python ends that thread inside a C++ destructor, and the process dies of SIGABRT: a rank that did all
its work has failed. NCCL's groups are ended by the last destructor otherwise, by an abort: torch warns of it on each
host, and what is still on its way to other ranks may be lost. Scripts that call `destroy_process_group` are safe; this
does it for those that do not.

Ending NCCL's groups waits for what this rank has enqueued and for the host's other ranks, which end at about the same
time or hang; after `_PATIENCE_S` the process ends as it would have without.

Looks torch up where it is loaded, and never imports it. Changes no exit code; a rank that failed is left alone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from dsrun.contract.environment import LEAVING_THREAD

#: Longest wait for collectives that are under way: their peers may hang.
_PATIENCE_S = 5.0


class GlooExit:
    """To be made before the program runs, so that its own exit handlers, which may use the groups, run before.

    Args:
        patience_s: longest that letting go may take.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._process = os.getpid()
        self._is_time = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self._at_exit)

    def program_ended(self) -> None:
        """Says that the program has ended well; its exit handlers and threads are still to come."""
        if os.getpid() != self._process or _distributed() is None:
            return
        # A thread, as nothing else bounds a destructor that waits; made here, for at exit Python 3.12 makes none. Torch
        # releases the interpreter's lock while it destroys a group, so that Gloo's threads get it, and NCCL's watchdog.
        self._thread = threading.Thread(target=self._let_go, name=LEAVING_THREAD, daemon=True)
        self._thread.start()

    def _at_exit(self) -> None:
        # A fork of the rank has neither this thread nor those of the groups.
        if self._thread is not None and os.getpid() == self._process:
            self._is_time.set()
            self._thread.join(self._patience_s)

    def _let_go(self) -> None:
        self._is_time.wait()
        # The program's own exit handlers may have done it.
        distributed = _distributed()
        if distributed is not None:
            distributed.destroy_process_group()


def _distributed() -> Any:
    """Returns torch.distributed if it has a default group that Gloo and NCCL alone serve; None otherwise."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    # As in "cpu:gloo,cuda:nccl". Of other libraries nothing is known.
    backends = {part.rpartition(":")[2] for part in distributed.get_backend_config().split(",")}
    return distributed if backends <= {"gloo", "nccl"} else None
