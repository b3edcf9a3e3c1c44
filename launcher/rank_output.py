"""One rank's output on the front end: the complete file, the lines for the console, and the tail for a report."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from dsrun.errors import LaunchError

from .failures import TAIL_LINES
from .lines import LineAssembler
from .protocol import Output, StreamName

#: Longest part of a line that a report repeats.
_TAIL_LINE_CHARACTERS = 2000


class RankOutput:
    """Takes a rank's frames in order.

    The file holds every byte of both streams in order of arrival, bars and a missing last newline included; only
    the lines are folded.

    Args:
        rank: whose output.
        run_dir: where the file goes; it must exist.
        show: gets whole lines.
        warn: gets one line, should the file become incomplete.

    Raises:
        LaunchError: the file cannot be made.
    """

    def __init__(
        self,
        rank: int,
        run_dir: str,
        *,
        show: Callable[[int, StreamName, Sequence[str]], None],
        warn: Callable[[str], None],
    ) -> None:
        self.path = Path(run_dir) / f"rank{rank}.log"
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._rank = rank
        self._at_line_start = True
        self._show = show
        self._warn = warn
        self._lines: dict[StreamName, LineAssembler] = {"stdout": LineAssembler(), "stderr": LineAssembler()}
        try:
            # Not through a link that somebody planted, and for this user only.
            self._fd: int | None = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise LaunchError(f"log file {self.path}: cannot be made: {error.strerror}") from error

    def take(self, frame: Output) -> None:
        """Writes a frame to the file and shows the lines that it completes."""
        data = frame.text.encode("utf-8", "surrogateescape")
        self._write(data)
        self._at_line_start = data.endswith(b"\n")
        self._deliver(frame.stream, self._lines[frame.stream].feed(data, now_s=frame.time_s))

    def finish(self, *, last_word: str | None = None) -> None:
        """Shows what was left without an end of line, and closes the file.

        Args:
            last_word: what the rank left beside its streams; ends the file, on lines of its own.
        """
        for name, assembler in self._lines.items():
            self._deliver(name, assembler.finish())
        if last_word is not None:
            self._write((last_word if self._at_line_start else f"\n{last_word}").encode("utf-8", "replace") + b"\n")
        self._close()

    def _deliver(self, stream: StreamName, lines: Sequence[str]) -> None:
        self.tail.extend(line[:_TAIL_LINE_CHARACTERS] for line in lines[-TAIL_LINES:])
        if lines:
            self._show(self._rank, stream, lines)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._fd is not None:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                # A full disk must not end a job that may be about to save: its output still reaches the console.
                self._close()
                self._warn(f"{self.path} is incomplete from here on: {error.strerror}")

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
