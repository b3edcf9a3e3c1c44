"""Starts commands on hosts with the system's own ssh client, for sites whose ssh_config needs it.

Whatever the client can do, it does here: jumps, certificates, a master connection that is already open. It is never
let ask for anything. No local shell is involved; what the remote one reads stands in `transport/login_line.py`.
"""

from __future__ import annotations

import math
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dsrun.errors import LaunchError

from ...hosts.spec import HostSpec
from ..base import CONNECT_TIMEOUT_S, START_PATIENCE_S
from ..client_start import ClientStart, wait_for_start
from ..local import LocalChannel
from ..login_line import Preamble, remote_line, status_of
from . import faults as ssh_faults
from .retries import knock

#: Unanswered questions of the client to the server before it gives up.
_ALIVE_COUNT = 3
#: For the client to end once its stdout is closed.
_END_PATIENCE_S = 5.0
_NEW_KEY = "Permanently added"


class OpensshTransport:
    """One client process, and one connection, a host.

    Args:
        lease_s: longest silence of a host; the client notices a dead server within that time.
        connect_timeout_s: longest wait for a server to be there, and to answer.
        start_patience_s: longest wait for the command after that.
        config: an ssh_config to read in place of the user's and the system's.
        announce: callback that gets one line about each host key that was accepted as new; None refuses new keys,
            unless ssh_config itself accepts them.
        note: callback that gets one line about what a start waits for, as a server that is not there yet is tried
            again; None for none.
        program: the client.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        start_patience_s: float = START_PATIENCE_S,
        config: Path | None = None,
        announce: Callable[[str], None] | None = None,
        note: Callable[[str], None] | None = None,
        program: str = "ssh",
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._start_patience_s = start_patience_s
        self._announce = announce
        self._note = note
        self._closed = threading.Event()
        self._lock = threading.Lock()
        #: Clients whose commands have not begun. They are out of the terminal's reach, and end by themselves only once
        #: the other side does.
        self._starting: set[subprocess.Popen[bytes]] = set()
        self._head = [program, "-T", *([] if config is None else ["-F", str(config)])]
        options = {
            "BatchMode": "yes",
            "ServerAliveInterval": f"{max(1, int(lease_s / _ALIVE_COUNT))}",
            "ServerAliveCountMax": f"{_ALIVE_COUNT}",
            # A master of ours would stay behind, with our pipes open; one that the user has opened is welcome.
            "ControlMaster": "no",
            # Meant for people's sessions: a second one cannot have the port.
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
        }
        if announce is not None:
            options["StrictHostKeyChecking"] = "accept-new"
        self._head += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]

    def start(self, host: HostSpec, argv: Sequence[str]) -> OpensshChannel:
        """Connects, and returns when the command starts. See `Transport`.

        Args:
            host: host on which the command starts.
            argv: the command's words.

        Raises:
            LaunchError: no connection, no login, or no such program there.
        """
        line = remote_line(host, argv)
        return knock(
            lambda timeout_s: self._start(host, argv, line, timeout_s),
            patience_s=self._connect_timeout_s,
            stopped=self._closed,
            note=self._note,
        )

    def close(self) -> None:
        """See `OwnedTransport`."""
        with self._lock:
            self._closed.set()
            for process in self._starting:
                process.kill()

    def _start(self, host: HostSpec, argv: Sequence[str], line: bytes, timeout_s: float) -> OpensshChannel:
        head = [*self._head, "-o", f"ConnectTimeout={math.ceil(timeout_s)}", *_destination(host)]
        words = [*map(os.fsencode, head), line]
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
            )
        except OSError as error:
            raise LaunchError(
                f"host {host.name}: cannot run {self._head[0]!r} here: {error.strerror}",
                hint="install the OpenSSH client (apt-get install openssh-client)",
            ) from error
        with self._lock:
            self._starting.add(process)
            if self._closed.is_set():
                process.kill()
        stdout, stderr = Preamble(), Preamble()
        try:
            self._wait_for_start(process, stdout, stderr, host, argv)
        except BaseException:
            process.kill()
            with process:
                raise
        finally:
            with self._lock:
                self._starting.discard(process)
        if self._announce is not None:
            for said in stderr.text.splitlines():
                if _NEW_KEY in said:
                    self._announce(f"host {host.name}: {said.strip()}")
        return OpensshChannel(process, stdout.rest, stderr.rest)

    def _wait_for_start(
        self,
        process: subprocess.Popen[bytes],
        stdout: Preamble,
        stderr: Preamble,
        host: HostSpec,
        argv: Sequence[str],
    ) -> None:
        """Reads both streams until the command's own output begins."""
        patience_s = self._connect_timeout_s + self._start_patience_s
        match wait_for_start(process, stdout, stderr, patience_s=patience_s):
            case ClientStart.LATE:
                raise ssh_faults.never_started(host, argv, None, stdout=stdout.text, stderr=stderr.text)
            case ClientStart.ENDED:
                raise self._explain_end(process, stdout, stderr, host, argv)
            case ClientStart.STARTED:
                pass

    def _explain_end(
        self,
        process: subprocess.Popen[bytes],
        stdout: Preamble,
        stderr: Preamble,
        host: HostSpec,
        argv: Sequence[str],
    ) -> LaunchError:
        try:
            status = process.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return ssh_faults.never_started(host, argv, None, stdout=stdout.text, stderr=stderr.text)
        timeout_s = self._connect_timeout_s
        return ssh_faults.from_client(host, argv, status, timeout_s=timeout_s, stderr=stderr.text, stdout=stdout.text)


def _destination(host: HostSpec) -> list[str]:
    """The words for where to connect: `Host` sections of ssh_config go by the host's name, wherever it is."""
    words: list[str] = []
    if host.addr is not None:
        # The client would expand %-tokens in it, and an address may name its interface behind one.
        words += ["-o", f"HostName={host.addr.replace('%', '%%')}"]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user is not None:
        words += ["-l", host.user]
    return [*words, "--", host.name.removeprefix("[").removesuffix("]")]


class OpensshChannel(LocalChannel):
    """The pipes of a client that has logged in and started the command.

    Args:
        process: the client.
        stdout: bytes of the command's stdout that were read while it started.
        stderr: the same of its stderr.
    """

    def __init__(self, process: subprocess.Popen[bytes], stdout: bytes, stderr: bytes) -> None:
        super().__init__(process)
        self._early_stdout = stdout
        self._early_stderr = stderr

    def read_stdout(self) -> bytes:
        """See `Channel`."""
        early, self._early_stdout = self._early_stdout, b""
        return early or super().read_stdout()

    def read_stderr(self) -> bytes:
        """See `Channel`."""
        early, self._early_stderr = self._early_stderr, b""
        return early or super().read_stderr()

    def wait(self, timeout_s: float) -> int | None:
        """See `Channel`; what the client itself ends with, 255, says that the connection was lost."""
        status = super().wait(timeout_s)
        return None if status is None else status_of(status)
