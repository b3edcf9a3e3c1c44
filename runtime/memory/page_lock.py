"""Page-locks host memory with CUDA, so that copies run beside computing, and leaves no trace where CUDA refuses.

Whose memory it is, and what becomes of it where it stays pageable, others know: `host_pool.py`, and checkpoints'
staging.

[Note: a refused lock] torch's bindings return CUDA's status, and CUDA remembers the error for this thread besides,
until somebody asks for the last one. torch asks behind each launch of a kernel, so the next launch would fail with "out
of memory" at an innocent line, and the fallback to pageable memory would end the run. So the error is taken back here,
in the thread that was refused: from the very runtime that torch is linked to, or by a launch that may fail.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class CannotLock(Exception):
    """The system refuses to page-lock memory; why is its text."""


#: Page-locks bytes from an address on, and returns what ends it. Raises CannotLock.
Lock = Callable[[int, int], Callable[[], object]]


class LockCalls(Protocol):
    """What is asked of CUDA in the calling thread; tests write it down."""

    def register(self, address: int, nbytes: int) -> int:
        """Page-locks memory; returns a status, 0 where it went well."""
        ...

    def unregister(self, address: int) -> int:
        """Ends that; likewise."""
        ...

    def text(self, status: int) -> str:
        """Returns what a status means."""
        ...

    def forget(self, status: int) -> None:
        """Has CUDA forget the error of the last call, see [Note: a refused lock]."""
        ...


class CudaLock:
    """A `Lock`.

    Args:
        device: CUDA device with the context that memory is registered in; without it a thread would make a context on
            GPU 0.
        calls: calls of CUDA; None for the real ones.
    """

    def __init__(self, device: torch.device, *, calls: LockCalls | None = None) -> None:
        self._calls = _CudaCalls(device) if calls is None else calls

    def __call__(self, address: int, nbytes: int) -> Callable[[], object]:
        """See `Lock`."""
        calls = self._calls
        status = calls.register(address, nbytes)
        if status:
            reason = f"cudaHostRegister: {calls.text(status)}"
            calls.forget(status)
            raise CannotLock(reason)
        process = os.getpid()

        def unlock() -> None:
            if os.getpid() != process:
                return  # a fork has no part in it, and may not call CUDA
            status = calls.unregister(address)
            if status:
                calls.forget(status)

        return unlock


def lock_until_gone(memory: Tensor, lock: Lock) -> Callable[[], object]:
    """Page-locks the memory of a tensor until the tensor goes; returns what ends it before, once.

    At the end of the process nobody unlocks: a thread may still copy, and the driver does it.

    Args:
        memory: flat, all of what it lies in.
        lock: lock to use for the memory.

    Raises:
        CannotLock: it stays pageable.
    """
    ended = weakref.finalize(memory, lock(memory.data_ptr(), memory.nbytes))
    ended.atexit = False
    return ended


class _CudaCalls:
    """CUDA, by torch's bindings, with `device` current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self._device):
            return int(_cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> int:
        with torch.cuda.device(self._device):
            return int(_cudart().cudaHostUnregister(address))

    def text(self, status: int) -> str:
        runtime = _cudart()
        return str(runtime.cudaGetErrorString(runtime.cudaError(status)))

    def forget(self, status: int) -> None:
        if _last_error() == status:
            return
        # Linked into torch itself, CUDA's runtime has no name to ask by. Whatever this launch says was said before.
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _last_error() -> int | None:
    """Returns CUDA's last error in this thread, which it then forgets; None where the runtime cannot be asked.

    A library is asked that torch's own launches go through: of several runtimes in a process each has errors of its
    own, and this one's dependencies name the right one.
    """
    try:
        return int(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so")).cudaGetLastError())
    except (OSError, AttributeError):
        return None
