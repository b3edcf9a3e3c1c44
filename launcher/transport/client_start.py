"""The first words of a local client, ssh or srun, that starts a command elsewhere: read up to the command's own output.

What a client is told, and what it means that one ends or is late, is known by the transport that starts it.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from enum import Enum, auto

from .login_line import Preamble

_READ_BYTES = 1 << 16


class ClientStart(Enum):
    """How a client's start went."""

    STARTED = auto()  # the command's own output begins
    LATE = auto()  # nothing more was said in time
    ENDED = auto()  # both streams ended, and the command has not begun


def wait_for_start(
    process: subprocess.Popen[bytes], stdout: Preamble, stderr: Preamble, *, patience_s: float
) -> ClientStart:
    """Reads both streams of a client until the command's own output begins.

    Args:
        process: the client, both streams of which are pipes.
        stdout: `Preamble` that gets the bytes of the client's stdout.
        stderr: `Preamble` that gets the bytes of the client's stderr.
        patience_s: longest wait for the whole.
    """
    assert process.stdout is not None, "stdout is a pipe"
    assert process.stderr is not None, "stderr is a pipe"
    streams = {process.stdout.fileno(): stdout, process.stderr.fileno(): stderr}
    poll = select.poll()
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    deadline_s = time.monotonic() + patience_s
    while not (stdout.is_over and stderr.is_over):
        if not streams:
            # Both marks come before anything can end, so that one of them is missing for good.
            return ClientStart.ENDED
        ready = poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3)
        if not ready:
            return ClientStart.LATE
        for descriptor, _ in ready:
            data = os.read(descriptor, _READ_BYTES)
            streams[descriptor].feed(data)
            if not data:
                poll.unregister(descriptor)
                del streams[descriptor]
    return ClientStart.STARTED
