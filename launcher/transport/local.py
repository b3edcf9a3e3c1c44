"""Starts the agent on this very machine, as a process of its own session. Every host is taken to be this one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import MutableMapping, Sequence
from typing import IO

from dsrun.errors import LaunchError

from ..hosts.spec import HostSpec
from ..os_errors import refusal_of

_READ_BYTES = 1 << 18
#: Number of the descriptor that a command was started with beside its own three, see `inherited_stdin`.
_STDIN_FD_ENV = "DSRUN_STDIN_FD"


def inherited_stdin(environ: MutableMapping[str, str]) -> int | None:
    """Takes the descriptor of dsrun's own stdin that `LocalTransport` handed to this command, if it did.

    Args:
        environ: environment variables of this process; the one that names the descriptor is removed.
    """
    number = environ.pop(_STDIN_FD_ENV, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


class LocalTransport:
    """A child process per host.

    Args:
        stdin_fd: descriptor that is handed to every command, besides the pipe that is its own stdin; None for none.
    """

    def __init__(self, *, stdin_fd: int | None = None) -> None:
        self._stdin_fd = stdin_fd

    def start(self, host: HostSpec, argv: Sequence[str]) -> LocalChannel:
        """Starts `argv` out of reach of the terminal: Ctrl-C goes to the front end, which decides.

        Args:
            host: host that the error names; it is not contacted.
            argv: the command's words.

        Raises:
            LaunchError: the program cannot be run.
        """
        handed = self._stdin_fd
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=[] if handed is None else [handed],
                env=None if handed is None else {**os.environ, _STDIN_FD_ENV: str(handed)},
            )
        except OSError as error:
            raise LaunchError(f"host {host.name}: cannot run {argv[0]!r}: {refusal_of(error)}") from error
        return LocalChannel(process)

    def close(self) -> None:
        """Keeps nothing. See `OwnedTransport`."""


class LocalChannel:
    """The pipes of one child process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None, "stdin is a pipe"
        assert process.stdout is not None, "stdout is a pipe"
        assert process.stderr is not None, "stderr is a pipe"
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr

    def send(self, data: bytes) -> None:
        """See `Channel`."""
        if self._stdin.closed:
            raise BrokenPipeError("the command's stdin is closed")
        view = memoryview(data)
        while view:
            view = view[os.write(self._stdin.fileno(), view) :]

    def end_input(self) -> None:
        """See `Channel`."""
        self._stdin.close()

    def read_stdout(self) -> bytes:
        """See `Channel`."""
        return _read(self._stdout)

    def read_stderr(self) -> bytes:
        """See `Channel`."""
        return _read(self._stderr)

    def wait(self, timeout_s: float) -> int | None:
        """See `Channel`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """See `Channel`."""
        self._process.kill()


def _read(pipe: IO[bytes]) -> bytes:
    """Reads what there is; closes the pipe at its end, and stays at the end from then on."""
    if pipe.closed:
        return b""
    data = os.read(pipe.fileno(), _READ_BYTES)
    if not data:
        pipe.close()
    return data
