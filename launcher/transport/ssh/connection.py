"""Starts commands on hosts over ssh, by a connection of its own in this process (fabric, paramiko). No local program.

How a host is found and trusted stands in `login.py`; what its shell reads in `transport/login_line.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.errors import LaunchError

from ...hosts.spec import HostSpec
from ..base import CONNECT_TIMEOUT_S, CONNECTION_LOST, START_PATIENCE_S
from ..login_line import Preamble, remote_line, status_of
from . import faults as ssh_faults
from .login import LoggedIn, SshLogin
from .retries import knock

if TYPE_CHECKING:
    from paramiko import Channel as SessionChannel

_READ_BYTES = 1 << 18
#: At least what a packet of the protocol holds.
_WRITE_BYTES = 1 << 16
#: Questions to the server within a lease, so that firewalls keep the connection.
_ALIVE_COUNT = 3
#: For an answer on a connection that has served before.
_REOPEN_TIMEOUT_S = 3.0
#: What `wait` returns for a command that was killed from here.
_KILLED = -9


class SshTransport:
    """One connection for each command that runs; that of one which has ended carries the host's next.

    Args:
        lease_s: longest silence of a host.
        connect_timeout_s: longest wait for a server to be there, and for each step of a connection to it.
        start_patience_s: longest wait for the command after that.
        config: an ssh_config to read in place of the user's and the system's.
        announce: callback that gets one line about each host key that was accepted as new; None refuses new keys.
        note: callback that gets one line about what a start waits for, as a server that is not there yet is tried
            again; None for none.
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
    ) -> None:
        self._keepalive_s = max(1, int(lease_s / _ALIVE_COUNT))
        self._connect_timeout_s = connect_timeout_s
        self._start_patience_s = start_patience_s
        self._login = SshLogin(config=config, announce=announce)
        self._note = note
        self._closed = threading.Event()
        self._lock = threading.Lock()
        #: The channels whose connections stand, by what a connection depends on.
        self._channels: dict[HostSpec, list[SshChannel]] = {}

    def start(self, host: HostSpec, argv: Sequence[str]) -> SshChannel:
        """Connects, and returns when the command starts. See `Transport`.

        Args:
            host: host on which the command starts.
            argv: the command's words.

        Raises:
            LaunchError: no connection, no login, or no such program there.
        """
        line = remote_line(host, argv)
        connection, session = self._reopen(host) or self._open(host)
        try:
            channel = self._start(connection, session, line, host, argv)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._channels.setdefault(_destination(host), []).append(channel)
        return channel

    def close(self) -> None:
        """See `OwnedTransport`."""
        self._closed.set()
        with self._lock:
            channels = [channel for of_host in self._channels.values() for channel in of_host]
            self._channels.clear()
        for channel in channels:
            connection = channel.hand_over()
            if connection is not None:
                connection.close()

    def _reopen(self, host: HostSpec) -> tuple[LoggedIn, SessionChannel] | None:
        """Opens a session on the connection of a command that has ended; None if there is none that still works."""
        from paramiko import SSHException

        while True:
            with self._lock:
                channels = self._channels.get(_destination(host), [])
                connection = next((free for channel in channels if (free := channel.hand_over()) is not None), None)
                channels[:] = [channel for channel in channels if channel.is_connected]
            if connection is None:
                return None
            try:
                timeout_s = min(_REOPEN_TIMEOUT_S, self._connect_timeout_s)
                return connection, connection.transport.open_session(timeout=timeout_s)
            except (SSHException, OSError, EOFError):
                # It was lost meanwhile.
                connection.close()

    def _open(self, host: HostSpec) -> tuple[LoggedIn, SessionChannel]:
        from paramiko import SSHException

        connection = knock(
            lambda timeout_s: self._login.connect(host, timeout_s),
            patience_s=self._connect_timeout_s,
            stopped=self._closed,
            note=self._note,
        )
        try:
            connection.transport.set_keepalive(self._keepalive_s)
            return connection, connection.transport.open_session(timeout=self._connect_timeout_s)
        except (SSHException, OSError, EOFError) as error:
            connection.close()
            raise _no_session(host, error) from error

    def _start(
        self, connection: LoggedIn, session: SessionChannel, line: bytes, host: HostSpec, argv: Sequence[str]
    ) -> SshChannel:
        from paramiko import SSHException

        stdout, stderr = Preamble(), Preamble()
        deadline_s = time.monotonic() + self._start_patience_s
        try:
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
            raise _no_session(host, error) from error
        session.settimeout(None)
        return SshChannel(connection, session, stdout.rest, stderr.rest)


def _destination(host: HostSpec) -> HostSpec:
    """What a connection depends on, of all that is known about a host."""
    return HostSpec(name=host.name, slots=1, source="", addr=host.addr, port=host.port, user=host.user)


def _no_session(host: HostSpec, error: Exception) -> LaunchError:
    return LaunchError(
        f"host {host.name}: logged in, but the server opened no session for a command: {error}",
        hint="its log says why; `MaxSessions` in its sshd_config may be 0, or the connection was lost",
    )


class SshChannel:
    """The session of one command.

    Args:
        connection: its own as long as the command runs.
        session: session of a command that has started.
        stdout: bytes of the command's stdout that were read while it started.
        stderr: the same of its stderr.
    """

    def __init__(self, connection: LoggedIn, session: SessionChannel, stdout: bytes, stderr: bytes) -> None:
        self._lock = threading.Lock()
        self._connection: LoggedIn | None = connection
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
        status = self._session.exit_status
        if status < 0:
            return _KILLED if self._killed else CONNECTION_LOST
        return status_of(status)

    def kill(self) -> None:
        """Closes the connection; the command sees the end of its stdin. See `Channel`."""
        with self._lock:
            if self._connection is not None:
                self._killed = True
                self._connection.close()

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection, and that was not closed."""
        with self._lock:
            return self._connection is not None and self._connection.transport.is_active()

    def hand_over(self) -> LoggedIn | None:
        """Gives away the connection if the command has ended and the connection has not.

        What has come and was not read yet stays readable.
        """
        with self._lock:
            connection = self._connection
            if connection is None or not self._session.closed or not connection.transport.is_active():
                return None
            self._connection = None
            return connection
