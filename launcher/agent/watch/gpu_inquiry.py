"""Asks the driver once, in a process of its own, what is wrong with this host's GPUs when a rank dies of one. Waits for
nothing: the agent's selector tells when there is an answer, and its loop when there will be none.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace

from dsrun.contract.error_file import WorkerError

from ...isolated_command import isolated_command
from ...plan.launch_plan import GpuPlace
from ...process_modules import GPU_FAULTS
from ...protocol import FrameReader, GpuFinding, GpuFindings, Message, ProtocolError

#: The driver answers within a second; a GPU that is lost may hold it up for good.
DEADLINE_S = 10.0
_READ_BYTES = 1 << 16
_OF_A_GPU = re.compile(r"CUDA|NCCL|cuDNN|CUDNN|CUBLAS|NVML|AcceleratorError")


def is_of_a_gpu(status: int, error: WorkerError | None) -> bool:
    """Whether a rank may have died of its GPU: by its error, or where native code ended it without one."""
    if error is None:
        return status == -signal.SIGABRT
    return _OF_A_GPU.search(f"{error.message}\n{error.traceback}") is not None


class GpuInquiry:
    """One question a job, about the GPUs of its ranks here.

    Args:
        gpus: the GPU of each rank that has one.
        selector: the agent's; every key's data is a function to call when the key is ready.
        send: function that takes the answer, a message to the front end.
        command: command that asks the driver and writes its answer, None for dsrun's own; tests give another.
    """

    def __init__(
        self,
        gpus: Mapping[int, GpuPlace],
        selector: selectors.BaseSelector,
        send: Callable[[Message], None],
        *,
        command: list[str] | None = None,
    ) -> None:
        places = dict.fromkeys(gpus.values())
        self._gpus = [
            GpuFinding(
                uuid=place.uuid, address=place.address, ranks=[rank for rank, own in gpus.items() if own == place]
            )
            for place in places
        ]
        self._selector = selector
        self._send = send
        self._command = command or isolated_command(sys.executable, GPU_FAULTS)
        self._reader = FrameReader()
        self._process: subprocess.Popen[bytes] | None = None
        self._rank = 0
        self._deadline_s = float("inf")
        self._was_asked = False

    @property
    def pid(self) -> int | None:
        """The process that asks, None where none does."""
        return None if self._process is None else self._process.pid

    def ask(self, rank: int) -> None:
        """Starts to ask for a rank that died; a second one of this host says nothing new."""
        if self._was_asked or not self._gpus:
            return
        self._was_asked, self._rank = True, rank
        self._deadline_s = time.monotonic() + DEADLINE_S
        question = json.dumps([asdict(gpu) for gpu in self._gpus])
        with suppress(OSError):
            self._process = subprocess.Popen(
                [*self._command, str(os.getpid()), str(rank), question],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._selector.register(self._process.stdout, selectors.EVENT_READ, self._read)  # pyright: ignore[reportArgumentType]

    def is_open(self, now_s: float) -> bool:
        """Whether there may still be an answer; gives up when its time, in monotonic seconds, is over."""
        if self._process is not None and now_s >= self._deadline_s:
            silent = f"its driver did not answer within {DEADLINE_S:.0f} s"
            self._send(GpuFindings(rank=self._rank, gpus=[replace(gpu, faults=[silent]) for gpu in self._gpus]))
            # One that hangs in the kernel ends when that lets it go; nobody waits for it.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._close(self._process)
        return self._process is not None

    def _read(self) -> None:
        assert self._process is not None, "its pipe is registered"
        assert self._process.stdout is not None, "stdout is a pipe"
        data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        with suppress(ProtocolError):
            for message in self._reader.feed(data):
                self._send(message)
        if not data:
            self._close(self._process)

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "stdout is a pipe"
        self._selector.unregister(process.stdout)
        process.stdout.close()
        # The agent reaps all its children; its pid may be another's by then.
        process.returncode = 0
        self._process = None
