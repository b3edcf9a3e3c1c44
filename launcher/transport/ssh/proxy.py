"""A `ProxyCommand`: a program that carries a connection, behind a socket of this process. Knows nothing of ssh.

paramiko has one, too; its proxy shares the terminal's Ctrl-C, blocks once it has said much, and its end is not noticed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress

#: From asking a proxy to end to killing it.
_END_PATIENCE_S = 1.0
#: Of what it said, for a message.
_KEPT_BYTES = 1 << 12


class Proxy:
    """A running proxy.

    Args:
        command: command that the user's shell runs, as ssh gives it.

    Raises:
        OSError: the shell cannot be run.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        #: What goes in comes out where the proxy leads.
        self.socket, other = socket.socketpair()
        # In memory, for nobody reads it while the proxy runs.
        self._stderr = os.memfd_create("stderr of a proxy")
        self._lock = threading.Lock()
        self._ended = False
        try:
            with other:
                self._process = subprocess.Popen(
                    [os.environ.get("SHELL", "/bin/sh"), "-c", f"exec {command}"],
                    stdin=other.fileno(),
                    stdout=other.fileno(),
                    stderr=self._stderr,
                    start_new_session=True,
                )
        except OSError:
            self.socket.close()
            os.close(self._stderr)
            raise

    @property
    def said(self) -> str:
        """The last of what it has said on stderr; not to be asked once it was ended."""
        size = os.fstat(self._stderr).st_size
        return os.pread(self._stderr, _KEPT_BYTES, max(0, size - _KEPT_BYTES)).decode(errors="replace")

    def end(self) -> None:
        """Ends the proxy and what it started, at once; may be called twice and from any thread."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self.socket.close()
            # Asked, then killed: a program of several processes may want to end them.
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self._process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(self._process.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(_END_PATIENCE_S)
            os.close(self._stderr)
