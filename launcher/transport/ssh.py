"""Starts commands on hosts over ssh, by a connection of its own in this process (fabric, paramiko). No local program.

How a host is found and trusted stands in ssh_login; what its shell reads in ssh_words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.errors import LaunchError

from ..hosts import HostSpec
from . import ssh_faults
from .base import CONNECTION_LOST
from .openssh import CONNECT_TIMEOUT_S, START_PATIENCE_S
from .ssh_login import LoggedIn, SshLogin
from .ssh_words import Preamble, remote_line, status_of

if TYPE_CHECKING:
    from paramiko import Channel as SessionChannel

_READ_BYTES = 1 << 18
#: At least what a packet of the protocol holds.
_WRITE_BYTES = 1 << 16
#: Questions to the server within a lease, so that firewalls keep the connection.
_ALIVE_COUNT = 3
#: What `wait` returns for a command that was killed from here.
_KILLED = -9


class SshTransport:
    """One connection a host, with one session.

    Args:
        lease_s: longest silence of a host.
        connect_timeout_s: longest wait for each step of a connection.
        start_patience_s: longest wait for the command after that.
        config: an ssh_config to read in place of the user's and the system's.
        announce: told, as one line, of each host key that was accepted as new; None refuses them.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        start_patience_s: float = START_PATIENCE_S,
        config: Path | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._keepalive_s = max(1, int(lease_s / _ALIVE_COUNT))
        self._connect_timeout_s = connect_timeout_s
        self._start_patience_s = start_patience_s
        self._login = SshLogin(connect_timeout_s=connect_timeout_s, config=config, announce=announce)

    def start(self, host: HostSpec, argv: Sequence[str]) -> SshChannel:
        """Connects, and returns when the command starts. See `Transport`.

        Args:
            host: where.
            argv: the command's words.

        Raises:
            LaunchError: no connection, no login, or no such program there.
        """
        line = remote_line(host, argv)
        connection = self._login.connect(host)
        try:
            return self._start(connection, line, host, argv)
        except BaseException:
            connection.close()
            raise

    def _start(self, connection: LoggedIn, line: bytes, host: HostSpec, argv: Sequence[str]) -> SshChannel:
        from paramiko import SSHException

        stdout, stderr = Preamble(), Preamble()
        deadline_s = time.monotonic() + self._start_patience_s
        try:
            connection.transport.set_keepalive(self._keepalive_s)
            session = connection.transport.open_session(timeout=self._connect_timeout_s)
            session.settimeout(self._start_patience_s)
            session.exec_command(line)
            for preamble, read in ((stdout, session.recv), (stderr, session.recv_stderr)):
                while not preamble.is_over:
                    session.settimeout(max(1e-3, deadline_s - time.monotonic()))
                    data: bytes = read(_READ_BYTES)
                    if not data and preamble is stdout:
                        # Without a mark on one there is none on the other, and it says why.
                        break
                    if not data:
                        # The status may come after the end of the streams.
                        session.status_event.wait(max(0.0, deadline_s - time.monotonic()))
                        status = session.exit_status if session.exit_status >= 0 else CONNECTION_LOST
                        raise ssh_faults.never_started(host, argv, status, stdout=stdout.text, stderr=stderr.text)
                    preamble.feed(data)
        except TimeoutError as error:
            raise ssh_faults.never_started(host, argv, None, stdout=stdout.text, stderr=stderr.text) from error
        except (SSHException, OSError, EOFError) as error:
            raise LaunchError(
                f"host {host.name}: logged in, but the server opened no session for a command: {error}",
                hint="its log says why; `MaxSessions` in its sshd_config may be 0, or the connection was lost",
            ) from error
        session.settimeout(None)
        return SshChannel(connection, session, stdout.rest, stderr.rest)


class SshChannel:
    """The session of one command.

    Args:
        connection: its own, which ends with it.
        session: of a command that has started.
        stdout: what was read of the command's stdout meanwhile.
        stderr: the same of its stderr.
    """

    def __init__(self, connection: LoggedIn, session: SessionChannel, stdout: bytes, stderr: bytes) -> None:
        self._connection = connection
        self._session = session
        self._early_stdout = stdout
        self._early_stderr = stderr
        self._killed = False

    def send(self, data: bytes) -> None:
        """See `Channel`."""
        from paramiko import SSHException

        view = memoryview(data)
        while view:
            # The server tells the status first, and closes the session a moment later, or once nobody holds its pipes.
            if self._session.status_event.is_set():
                raise BrokenPipeError("the command has ended")
            try:
                # paramiko's `sendall` would go round for ever once the stdin was closed here.
                sent = self._session.send(bytes(view[:_WRITE_BYTES]))
            except (SSHException, EOFError) as error:
                raise BrokenPipeError(f"the connection is gone: {error}") from error
            if not sent:
                raise BrokenPipeError("the command's stdin is closed")
            view = view[sent:]

    def end_input(self) -> None:
        """See `Channel`."""
        from paramiko import SSHException

        try:
            self._session.shutdown_write()
        except (SSHException, EOFError) as error:
            raise BrokenPipeError(f"the connection is gone: {error}") from error

    def read_stdout(self) -> bytes:
        """See `Channel`."""
        early, self._early_stdout = self._early_stdout, b""
        return early or self._session.recv(_READ_BYTES)

    def read_stderr(self) -> bytes:
        """See `Channel`."""
        early, self._early_stderr = self._early_stderr, b""
        return early or self._session.recv_stderr(_READ_BYTES)

    def wait(self, timeout_s: float) -> int | None:
        """See `Channel`."""
        if not self._session.status_event.wait(timeout_s):
            return None
        if self._session.closed:
            # What has come and was not read yet stays readable.
            self._connection.close()
        status = self._session.exit_status
        if status < 0:
            return _KILLED if self._killed else CONNECTION_LOST
        return status_of(status)

    def kill(self) -> None:
        """Closes the connection; the command sees the end of its stdin. See `Channel`."""
        self._killed = True
        self._connection.close()
