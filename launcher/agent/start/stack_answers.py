"""A rank's answers to where it is: it writes the stacks of all its threads into a file of its own whenever it is asked.

The rank's side; the agent's is `watch.stacks`. Does not read stacks.

[Note: two ways to ask] faulthandler walks the frames of all threads. From a signal handler it does so without the GIL,
and a thread that runs Python meanwhile can end the whole rank with SIGSEGV. So a thread of the rank's waits at a FIFO,
and writes while it has the GIL: no other thread runs Python then. Where it does not get the GIL, another thread keeps
it in native code: then nothing of Python moves either, and the signal is safe, and answers.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import signal
import sys
from pathlib import Path

from dsrun.contract.environment import STACKS_SIGNAL
from dsrun.contract.job_paths import stacks_pipe

from ..fifo_requests import open_requests


def answer_with_stacks(path: Path) -> None:
    """Has this process write its stacks whenever it is asked. See [Note: two ways to ask].

    Args:
        path: file to which they are appended, a dump of faulthandler for each request.
    """
    try:
        # No link is followed, as the folder's files have names that anybody can tell in advance.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        print(f"dsrun: cannot write {path}: {error.strerror}", file=sys.stderr, flush=True)
        return
    # Both serve until the process ends. The FIFO is first, for who catches the signal is asked.
    requests = open_requests(stacks_pipe(path))
    if requests is not None:
        try:
            # Not one of `threading`, which a program may count, list or wait for.
            _thread.start_new_thread(write_stacks_when_asked, (requests, descriptor))
        except RuntimeError:
            # No more threads may be started: nobody listens then, and the signal alone asks.
            os.close(requests)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
    # A system call of native code that does not expect signals goes on instead of failing with EINTR.
    signal.siginterrupt(STACKS_SIGNAL, False)


def write_stacks_when_asked(requests: int, file: int) -> None:
    """Body of the thread that answers; never returns.

    Args:
        requests: descriptor of the FIFO; each request is a byte.
        file: descriptor of the file for the stacks.
    """
    # Requests that came together have one answer.
    while os.read(requests, 64):
        faulthandler.dump_traceback(file, all_threads=True)
