"""What the front end needs of a way to reach a host: start one command there, and three pipes to it.

Knows nothing of agents or of the protocol. Each way is a module beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..hosts.spec import HostSpec

#: For a server to be there and exchange keys. Of a connection's first packet three repetitions fall into it (after 1, 3
#: and 7 s).
CONNECT_TIMEOUT_S = 8.0
#: From there to the command, which is for the login and the shell's start-up files.
START_PATIENCE_S = 20.0
#: For Slurm to start the task of a step, once that has its place.
STEP_PATIENCE_S = 60.0
#: From the first knock to the first word of the program that was started, as long as nobody has named longer times.
FIRST_WORD_PATIENCE_S = 60.0
#: The way out for a host that is well and slow.
WAIT_LONGER = "`--start-timeout 2m` waits longer"
#: What `Channel.wait` returns for a command whose connection was lost, so that nobody knows how it ended: ssh's own
#: number. No agent exits with it.
CONNECTION_LOST = 255


def first_word_patience_s(connect_timeout_s: float | None, start_timeout_s: float | None) -> float:
    """Returns the longest time from the first knock at a host to the first word of the program that was started there.

    Args:
        connect_timeout_s: longest wait for a server; None means the transport's own.
        start_timeout_s: longest wait in seconds for the command to start, and again for its first word; None means
            `START_PATIENCE_S`.
    """
    connect_s = CONNECT_TIMEOUT_S if connect_timeout_s is None else connect_timeout_s
    start_s = START_PATIENCE_S if start_timeout_s is None else start_timeout_s
    return max(FIRST_WORD_PATIENCE_S, connect_s + 2 * start_s)


class Channel(Protocol):
    """A started command and its pipes. Reads block, and return b"" for good once the other end is gone."""

    def send(self, data: bytes) -> None:
        """Writes all of `data` to the command's stdin.

        Raises:
            OSError: the command reads no more.
        """
        ...

    def end_input(self) -> None:
        """Closes the command's stdin; the agent takes that as the end of its front end. May be called twice."""
        ...

    def read_stdout(self) -> bytes:
        """Waits for bytes of the command's stdout."""
        ...

    def read_stderr(self) -> bytes:
        """Waits for bytes of the command's stderr."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the command to end.

        Args:
            timeout_s: longest wait.

        Returns:
            exit code, or minus the signal's number, or `CONNECTION_LOST`; None if it has not ended.
        """
        ...

    def kill(self) -> None:
        """Kills the command itself at once; what it started is to notice by itself."""
        ...


class Transport(Protocol):
    """Starts commands on hosts."""

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        """Starts a command on `host`.

        Args:
            host: host on which the command starts.
            argv: the command's words, which no shell reads.

        Raises:
            LaunchError: the command could not be started.
        """
        ...


class OwnedTransport(Transport, Protocol):
    """A transport as its maker sees it, who is to close it in the end."""

    def close(self) -> None:
        """Gives up what is kept for further commands, and starts that are under way; may be called twice.

        To be called once the commands have ended. What still runs loses nothing by it.
        """
        ...
