"""How a running job looks: whole tagged lines, dsrun's own notes, and nothing else. Knows nothing of processes.

stdout is data, stderr is talk: what ranks write to stdout goes to stdout and what they write to stderr to stderr, each
line whole and tagged `[rank]` (`[host:rank]` on several hosts); dsrun's own notes go to stderr as `dsrun: ...`.
Every line carries its tag, with one rank as with many, so nothing that reads them must know how many there are.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

# Six colours that can be read on dark and on light ground; red is left for errors.
_TAG_COLOURS = ("36", "32", "35", "34", "33", "96")
_RED, _YELLOW, _RESET = "\x1b[1;31m", "\x1b[1;33m", "\x1b[0m"

#: What a shell reports for a process that wrote to a pipe nobody reads.
CLOSED_PIPE_EXIT = 141


class RawStream(Protocol):
    """An unbuffered byte stream, as `io.FileIO` is one."""

    def write(self, data: bytes, /) -> int | None:
        """Writes some of `data`; returns how much, or None where the stream does not block and is full."""
        ...

    def fileno(self) -> int:
        """Returns the descriptor."""
        ...


class Printer:
    """Writes lines of ranks and notes of dsrun, each with one system call so that lines never mix.

    A stream that nobody reads any more is dropped and reported once: printing never raises.
    """

    def __init__(
        self,
        *,
        stdout: RawStream,
        stderr: RawStream,
        stdout_colour: bool = False,
        stderr_colour: bool = False,
        hosts: Sequence[str] = ("localhost",),
        quiet: bool = False,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares to print.

        Args:
            stdout: where lines of ranks' stdout go; with `--json` the caller gives stderr here.
            stderr: where lines of ranks' stderr, and notes, go.
            stdout_colour: tags on stdout may be coloured.
            stderr_colour: the same for stderr.
            hosts: host of each rank, by rank; one host for all is enough where there is only one.
            quiet: notes are not printed; lines and reports are.
            on_closed: called once, when the reader of stdout or stderr went away.
        """
        self._streams: dict[str, RawStream] = {"stdout": stdout, "stderr": stderr}
        self._colour = {"stdout": stdout_colour, "stderr": stderr_colour}
        self._hosts = hosts
        self._several_hosts = len(set(hosts)) > 1
        self._quiet = quiet
        self._on_closed = on_closed
        self.closed = False

    def line(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        """Prints one whole line of a rank.

        Args:
            rank: who wrote it.
            stream: where to.
            text: the line without its end; bytes that are no UTF-8 stand in it as surrogate escapes and leave as
                they came, terminal escapes too.
        """
        if stream not in self._streams:
            return
        tag = f"[{self._hosts[rank]}:{rank}]" if self._several_hosts else f"[{rank}]"
        if self._colour[stream]:
            tag = f"\x1b[{_TAG_COLOURS[rank % len(_TAG_COLOURS)]}m{tag}{_RESET}"
            # A rank that switches a colour on and not off would paint the lines of all others.
            text = f"{text}{_RESET}" if "\x1b" in text else text
        self._write(stream, f"{tag} {text}\n")

    def note(self, text: str) -> None:
        """Prints a line of dsrun's own talk."""
        if not self._quiet:
            self._write("stderr", f"dsrun: {text}\n")

    def warning(self, text: str) -> None:
        """Prints `warning:` lines about what the user gave."""
        if not self._quiet:
            self._write("stderr", f"{self._painted(text, 'warning:', _YELLOW)}\n")

    def report(self, lines: Sequence[str]) -> None:
        """Prints an `error:` report, quiet or not."""
        for line in lines:
            self._write("stderr", f"{self._painted(line, 'error:', _RED)}\n")

    def _painted(self, text: str, word: str, colour: str) -> str:
        if not self._colour["stderr"] or not text.startswith(word):
            return text
        return f"{colour}{word}{_RESET}{text.removeprefix(word)}"

    def _write(self, name: str, text: str) -> None:
        stream = self._streams.get(name)
        if stream is None:
            return
        try:
            _write_all(stream, encode(text))
        except OSError:
            # EPIPE: `| head` has read enough. EIO: the terminal is gone.
            del self._streams[name]
            if not self.closed:
                self.closed = True
                self._on_closed()


def terminal_printer(
    *,
    hosts: Sequence[str],
    quiet: bool,
    stdout_is_data: bool,
    environ: Mapping[str, str],
    on_closed: Callable[[], None],
) -> Printer:
    """Returns a printer on this process's own stdout and stderr.

    Args:
        hosts: as for `Printer`.
        quiet: as for `Printer`.
        stdout_is_data: stdout is kept for one JSON object, and all lines go to stderr.
        environ: where NO_COLOR, FORCE_COLOR and TERM are read.
        on_closed: as for `Printer`.
    """
    out, err = 2 if stdout_is_data else 1, 2
    return Printer(
        stdout=io.FileIO(out, "w", closefd=False),
        stderr=io.FileIO(err, "w", closefd=False),
        stdout_colour=wants_colour(environ, is_terminal=os.isatty(out)),
        stderr_colour=wants_colour(environ, is_terminal=os.isatty(err)),
        hosts=hosts,
        quiet=quiet,
        on_closed=on_closed,
    )


def wants_colour(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Applies NO_COLOR (no-color.org) and FORCE_COLOR; otherwise colour is for terminals that know it."""
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (is_terminal and environ.get("TERM", "dumb") != "dumb")


def encode(text: str) -> bytes:
    """Returns UTF-8, with surrogate escapes turned back into the bytes they stand for; never fails."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def _write_all(stream: RawStream, data: bytes) -> None:
    while data:
        written = stream.write(data)
        if written is None:
            # Whoever shares the terminal with us (ssh does) made it non-blocking; lines are not to be lost for that.
            os.set_blocking(stream.fileno(), True)
            continue
        data = data[written:]
