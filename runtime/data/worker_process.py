"""A loader's worker processes through the stop of a job.

A launcher's signal goes to a rank and to all that it has started. Torch's workers die of it, and the rank then of their
death, in the middle of what the signal asked it for: to finish the step and save. Workers that were set up here leave
the signal to their rank, and end as ever: when the loader lets them go, when it ends them, or when their rank is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading

import torch.multiprocessing

from dsrun.errors import InputError

#: Of a socket that is a file, on Linux (unix(7)).
_LONGEST_SOCKET_PATH = 107
#: Of a stop, and of those that ask for a checkpoint.
_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def leave_signals_to_rank(worker_id: int) -> None:
    """Has this worker ignore the signals of a stop that its own rank has not sent; a DataLoader's `worker_init_fn`.

    Args:
        worker_id: number of the worker process; without effect.
    """
    del worker_id
    # Blocked, and taken by a thread: a handler does not learn who has sent the signal, and the loader itself ends its
    # workers by SIGTERM when the interpreter ends.
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
    rank = multiprocessing.parent_process()
    assert rank is not None, "a worker has been started by its rank"
    arguments = (threading.get_ident(), rank.pid, os.getppid())
    threading.Thread(target=_listen, args=arguments, name="dsrun-worker-signals", daemon=True).start()


def check_temporary_folder() -> None:
    """Refuses a folder in which workers could not hand their batches over.

    Torch's workers answer on a socket there. Where its path is too long, their threads die of it and the rank waits
    for ever.

    Raises:
        InputError: the path is too long.
    """
    folder = tempfile.gettempdir()
    room = _LONGEST_SOCKET_PATH - len("/pymp-12345678/listener-12345678")
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor" and len(os.fsencode(folder)) > room:
        raise InputError(
            f"dataloader_num_workers: the folder for temporary files, {folder}, has {len(os.fsencode(folder))} bytes; "
            f"sockets of the loader's workers lie in it, for which it may have {room}",
            hint="set TMPDIR to a folder with a shorter path, or `dataloader_num_workers` to 0",
        )


def _listen(main: int, rank_pid: int | None, parent_pid: int) -> None:
    while True:
        told = signal.sigwaitinfo(_LEFT_TO_THE_RANK)
        # Another parent has taken over where the rank, or the server that forked this process for it, is gone.
        if told.si_signo == signal.SIGTERM and (told.si_pid == rank_pid or os.getppid() != parent_pid):
            # As Ctrl-C ends them: by way of their own exit handlers, which take files of multiprocessing away.
            signal.pthread_kill(main, signal.SIGINT)
