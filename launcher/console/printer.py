"""How a running job looks: whole tagged lines, dsrun's own notes, and nothing else. Knows nothing of processes.

stdout is data, stderr is talk: what ranks write to stdout goes to stdout and what they write to stderr to stderr, each
line whole and tagged `[rank]` (see `line_tag`); dsrun's own notes go to stderr as `dsrun: ...`.
Every line carries its tag, with one rank as with many, so nothing that reads them must know how many there are.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..protocol import StreamName
from .line_tag import LineTags

_RED, _YELLOW, _RESET = "\x1b[1;31m", "\x1b[1;33m", "\x1b[0m"

#: What a shell reports for a process that wrote to a pipe nobody reads.
CLOSED_PIPE_EXIT = 141

#: Between two questions whether to wait on for a reader that does not read.
_PATIENCE_S = 0.1
#: The reader is gone: `| head` has read enough, or the terminal was closed.
_NO_READER = frozenset({errno.EPIPE, errno.EIO})


class RawStream(Protocol):
    """An unbuffered byte stream."""

    def write(self, data: bytes, /) -> int:
        """Writes some of `data`; returns how much."""
        ...


class PatientStream:
    """A descriptor that is written to only while it takes something, so that the writer can look around meanwhile.

    Args:
        descriptor: blocking or not; stays open.
        keep_waiting: function asked whether to go on waiting while the reader does not read (a pager, a stopped
            terminal); False ends the write.
    """

    def __init__(self, descriptor: int, keep_waiting: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._keep_waiting = keep_waiting
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, data: bytes, /) -> int:
        """Writes as many whole lines as a pipe surely takes, or part of a long one. See `RawStream`.

        Raises:
            OSError: nobody reads, or will read in time.
        """
        # A pipe that is ready takes this much without blocking, and in one piece, whoever else writes to it.
        end = data.rfind(b"\n", 0, select.PIPE_BUF) + 1
        while True:
            while not self._poll.poll(_PATIENCE_S * 1000):
                if not self._keep_waiting():
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            try:
                return os.write(self._descriptor, data[: end or select.PIPE_BUF])
            except BlockingIOError:
                # Whoever shares the terminal with us (ssh does) made it non-blocking, and it took nothing after all.
                continue


@dataclass(slots=True)
class _OpenLine:
    """A line on the console that has no end yet.

    Attributes:
        rank: rank that wrote the line.
        stream: stream of the console on which the line is shown.
        text: text of the line as it is shown, with its tag.
        is_prompt: the rank waits for an answer: the line is shown again below whatever comes between.
    """

    rank: int
    stream: StreamName
    text: str
    is_prompt: bool = True


class Printer:
    """Writes lines of ranks and notes of dsrun, whole lines with every system call so that they never mix.

    A stream that nobody reads any more is dropped and reported once; one that cannot be written to otherwise (a full
    disk) is dropped with a note on the other, and the job goes on: its log is complete. Printing never raises.
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
        around: Callable[[str], str] = lambda text: text,
        one_place: bool = False,
        typed_on: Collection[StreamName] = (),
    ) -> None:
        """Prepares to print.

        Args:
            stdout: stream for lines of ranks' stdout; with `--json` the caller gives stderr here.
            stderr: stream for lines of ranks' stderr and for notes.
            stdout_colour: tags on stdout may be coloured.
            stderr_colour: the same for stderr.
            hosts: host of each rank, by rank; one host for all is enough where there is only one.
            quiet: notes are not printed; lines and reports are.
            on_closed: callback for the moment when the reader of stdout or stderr has gone away; called once.
            around: puts around whole lines what keeps a status area below them.
            one_place: stdout and stderr are the same terminal, file or pipe.
            typed_on: streams that are the terminal of dsrun's own stdin, where a person's line and its end are seen.
        """
        self._streams: dict[str, RawStream] = {"stdout": stdout, "stderr": stderr}
        self._colour = {"stdout": stdout_colour, "stderr": stderr_colour}
        self.tags = LineTags(hosts)
        self._quiet = quiet
        self._on_closed = on_closed
        self._around = around
        self._one_place = one_place
        self._typed_on = frozenset(typed_on)
        self._open: _OpenLine | None = None
        self.closed = False
        #: Why a stream could not be written to, where it was not for its reader.
        self.fault: OSError | None = None

    def lines(self, rank: int, stream: Literal["stdout", "stderr"], texts: Sequence[str]) -> None:
        """Prints whole lines of a rank. See `lines_of`."""
        self.lines_of((rank,), stream, texts)

    def lines_of(self, ranks: Sequence[int], stream: Literal["stdout", "stderr"], texts: Sequence[str]) -> None:
        """Prints whole lines that one or several ranks wrote alike.

        Args:
            ranks: ranks that wrote the lines.
            stream: stream on which the lines are printed.
            texts: lines without their ends; bytes that are no UTF-8 stand in them as surrogate escapes and leave as
                they came, terminal escapes too.
        """
        if stream not in self._streams:
            return
        tag = self.tags.text(ranks, coloured=self._colour[stream])
        if self._colour[stream]:
            texts = [_closed(text) for text in texts]
        separator = f"\n{tag} "
        self._write(stream, f"{tag} {separator.join(texts)}\n")

    @property
    def is_mid_line(self) -> bool:
        """Whether a line has been begun and not ended, so that nothing can be drawn below it."""
        return self._open is not None

    def begin_line(self, rank: int, stream: StreamName, text: str) -> None:
        """Prints a part of a line, at once; what other lines are printed next begin below it."""
        line = self._open
        if line is not None and (line.rank, line.stream) == (rank, stream):
            line.text, line.is_prompt = line.text + text, True
            self._emit(stream, text)
            return
        text = f"{self.tags.text((rank,), coloured=self._colour[stream])} {text}"
        self._break_line(stream)
        self._emit(stream, text)
        self._open = _OpenLine(rank, stream, text)

    def end_line(self, rank: int, stream: StreamName, rest: str) -> None:
        """Prints the rest of a line: behind its beginning, or on a line of its own if others came between."""
        line = self._open
        if line is not None and (line.rank, line.stream) == (rank, stream):
            self._open = None
            self._emit(stream, f"{rest}\n")
        elif rest:
            self.lines(rank, stream, [rest])

    def go_on(self, rank: int, *, typed: bool) -> None:
        """The rank waits for no answer any more.

        Args:
            rank: rank that waits no more.
            typed: a person has given it, and the terminal has gone to the next line.
        """
        line = self._open
        if line is not None and line.rank == rank:
            line.is_prompt = False
            if typed and line.stream in self._typed_on:
                self._open = None

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
            shown = _closed(line) if self._colour["stderr"] else line
            self._write("stderr", f"{self._painted(shown, 'error:', _RED)}\n")

    def _painted(self, text: str, word: str, colour: str) -> str:
        if not self._colour["stderr"] or not text.startswith(word):
            return text
        return f"{colour}{word}{_RESET}{text.removeprefix(word)}"

    def _write(self, name: str, text: str) -> None:
        line = self._open
        self._break_line(name)
        self._emit(name, text)
        if line is not None and line.is_prompt and self._open is None:
            self._open = line
            self._emit(line.stream, line.text)

    def _break_line(self, name: str) -> None:
        """Ends a line that was begun where others are to be printed now."""
        line = self._open
        if line is not None and (self._one_place or line.stream == name):
            self._open = None
            self._emit(line.stream, "\n")

    def _emit(self, name: str, text: str) -> None:
        stream = self._streams.get(name)
        if stream is not None and text:
            self._send(name, stream, self._around(text))

    def raw(self, text: str) -> None:
        """Sends to stderr what moves the cursor and is no line; the caller knows that it is a terminal."""
        stream = self._streams.get("stderr")
        if stream is not None and text:
            self._send("stderr", stream, text)

    def _send(self, name: str, stream: RawStream, text: str) -> None:
        data = encode(text)
        try:
            while data:
                data = data[stream.write(data) :]
        except OSError as error:
            self._streams.pop(name, None)
            if error.errno not in _NO_READER:
                self.fault = error
                self._write("stderr", f"dsrun: {name} cannot be written: {error.strerror}; the logs are complete\n")
            elif not self.closed:
                self.closed = True
                self._on_closed()


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


def _closed(text: str) -> str:
    """A rank that switches a colour on and not off would paint the lines of all others."""
    return f"{text}{_RESET}" if "\x1b" in text else text
