"""A terminal with `dsrun` in its foreground, as a person has it: what appears is waited for, what is typed is sent."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

#: Takes the terminal as this session's own, then becomes the command.
_ENTER = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal and the `dsrun` that runs in it; ends with the block.

    Args:
        *args: words of `dsrun`.
        cwd: its folder.
        env: its environment.
        command: command to run in place of `dsrun`, before its words; None for `dsrun`.
    """

    def __init__(self, *args: str, cwd: Path, env: Mapping[str, str], command: tuple[str, ...] | None = None) -> None:
        self._master, slave = pty.openpty()
        #: The terminal's settings before anything ran in it.
        self.settings = termios.tcgetattr(slave)
        words = (sys.executable, "-m", "dsrun") if command is None else command
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ENTER, *words, *args],
            cwd=cwd,
            env={"TERM": "dumb", **env},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""
        self._at = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, _type: object, _error: object, _stack: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that has appeared, without escapes."""
        return _ESCAPES.sub("", self._seen).replace("\r\n", "\n")

    @property
    def raw(self) -> str:
        """All that has appeared, with escapes."""
        return self._seen

    def resize(self, *, columns: int, lines: int) -> None:
        """Makes the terminal larger or smaller, as a person does with its window."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def expect(self, text: str, *, timeout_s: float = 20) -> str:
        """Waits until `text` appears behind what was expected last; returns what stood between."""
        until_s = time.monotonic() + timeout_s
        while (found := self.text.find(text, self._at)) < 0:
            if not self._read(until_s):
                raise AssertionError(f"{text!r} did not appear:\n{self.text}")
        between, self._at = self.text[self._at : found], found + len(text)
        return between

    def type(self, text: str) -> None:
        """Types keys; `\\x03` is Ctrl-C, `\\x04` Ctrl-D."""
        os.write(self._master, text.encode())

    def end(self, *, timeout_s: float = 20) -> int:
        """Reads to the end and returns the exit code."""
        until_s = time.monotonic() + timeout_s
        while self._read(until_s):
            pass
        return self.process.wait(max(0.1, until_s - time.monotonic()))

    def settings_now(self) -> list[object]:
        """The terminal's settings as they are."""
        return termios.tcgetattr(self._master)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signals the process alone."""
        self.process.send_signal(signum)

    def _read(self, until_s: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, until_s - time.monotonic()))[0]:
            raise AssertionError(f"nothing more appeared in time:\n{self.text}")
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:
            # The last process that had it open has closed it.
            return False
        self._seen += data.decode("utf-8", "replace")
        return bool(data)
