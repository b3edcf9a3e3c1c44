"""Copies files to a host with rsync, over a channel of the job's own transport. Decides nothing about which files.

rsync starts rsync_pipe where it would start ssh. That passes on what to run over there, which begins in the target
folder: so no path, address or option of a user is ever part of a line that a shell reads.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from dsrun.errors import LaunchError

from ..hosts.spec import HostSpec
from ..transport.base import Channel, Transport

#: Without a byte from the other end.
_SILENCE_S = 60
_END_PATIENCE_S = 5.0
_READ_BYTES = 1 << 16
#: Of what rsync says on the host; the first line says what failed.
_KEPT_BYTES = 4096


def is_here() -> bool:
    """Whether this machine has an rsync."""
    return shutil.which("rsync") is not None


def copy_by_rsync(
    paths: Sequence[str],
    *,
    folder: str,
    host: HostSpec,
    transport: Transport,
    target: str,
    program: str,
    keep: ExitStack,
) -> str | None:
    """Copies files with their modes, and symbolic links as links; each appears whole.

    Args:
        paths: relative to `folder`; the folders that they need exist in `target`.
        folder: folder to copy from, an absolute path.
        host: host to copy to.
        transport: transport that reaches the host.
        target: the folder there, an absolute path.
        program: path of rsync there.
        keep: its end kills what still runs.

    Returns:
        None, or why it failed.
    """
    ours, theirs = socket.socketpair()
    bridge = [sys.executable, "-I", "-S", str(Path(__file__).with_name("rsync_pipe.py")), str(theirs.fileno())]
    words = [
        *("rsync", "--files-from=-", "--from0", "--no-implied-dirs", "--links", "--perms", "--ignore-times"),
        # What is to be run there holds no path then: they follow as data.
        *("--protect-args", f"--timeout={_SILENCE_S}", "--rsh", " ".join(map(_quoted, bridge))),
        *("--", f"{folder.rstrip('/')}/", "host:."),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RSYNC_")}
    with ours:
        with theirs:
            process = subprocess.Popen(
                [*map(os.fsencode, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        keep.callback(process.kill)
        far_end = _FarEnd(ours, host, transport, target, program)
        serving = threading.Thread(target=far_end.serve, daemon=True)
        serving.start()
        # Without a folder in front, a name that begins with `#` or `;` would be a comment.
        _, stderr = process.communicate(b"".join(b"./%s\0" % os.fsencode(path) for path in paths))
        with suppress(OSError):
            # Where the bridge has gone, that is so already.
            ours.shutdown(socket.SHUT_RDWR)
        serving.join()
    # Files that could not be written there are told by the status there alone.
    status = process.returncode or far_end.status
    if not status and far_end.fault is None:
        return None
    lines = [line for line in (far_end.said + stderr).decode("utf-8", "replace").splitlines() if line.strip()]
    return far_end.fault or (lines[0] if lines else f"rsync ended with status {status}")


def _quoted(word: str) -> str:
    """Quotes a word for `--rsh`, as rsync reads it."""
    return "'" + word.replace("'", "''") + "'"


class _FarEnd:
    """Runs what the bridge asks for on the host, and carries the bytes."""

    def __init__(self, pipe: socket.socket, host: HostSpec, transport: Transport, target: str, program: str) -> None:
        #: Why nothing could be run there.
        self.fault: str | None = None
        #: What rsync there ended with; None if that is not known, or it never ran.
        self.status: int | None = None
        #: The beginning of what it wrote to stderr.
        self.said = b""
        self._pipe = pipe
        self._host = host
        self._transport = transport
        self._target = target
        self._program = program

    def serve(self) -> None:
        """Returns when rsync has ended here and there."""
        with suppress(OSError):
            # A bridge that has gone is rsync's to tell.
            with self._pipe.makefile("rb", buffering=0) as received:
                line = received.readline()
            if not line:
                return
            _rsync, *options = json.loads(line)
            script = 'cd "$1" && shift && exec "$@"'
            words = ["/bin/sh", "-c", script, "sh", self._target, self._program, *options]
            try:
                channel = self._transport.start(self._host, words)
            except LaunchError as error:
                self.fault = str(error)
                self._pipe.shutdown(socket.SHUT_RDWR)
                return
            self._carry(channel)

    def _carry(self, channel: Channel) -> None:
        readers = [threading.Thread(target=read, args=(channel,), daemon=True) for read in (self._back, self._drain)]
        for reader in readers:
            reader.start()
        try:
            with suppress(OSError):
                # Where either end is gone, the other one says so.
                while data := self._pipe.recv(_READ_BYTES):
                    channel.send(data)
            with suppress(OSError):
                channel.end_input()
            self.status = channel.wait(_END_PATIENCE_S)
        finally:
            channel.kill()
            for reader in readers:
                reader.join()

    def _back(self, channel: Channel) -> None:
        with suppress(OSError):
            while data := channel.read_stdout():
                self._pipe.sendall(data)
            self._pipe.shutdown(socket.SHUT_WR)

    def _drain(self, channel: Channel) -> None:
        """Reads what rsync says there to its end; unread, it would stand still."""
        with suppress(OSError):
            while data := channel.read_stderr():
                self.said += data[: _KEPT_BYTES - len(self.said)]
