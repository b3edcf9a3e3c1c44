"""One rank's output on the front end: its complete log, the lines for the console, and the tail for a report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..failures.causes.process_groups import LAST_WORDS
from ..failures.report import TAIL_LINES
from ..protocol import Output, StreamName
from .files import LogFiles
from .lines import BAR_INTERVAL_S, LineAssembler
from .output_index import IndexWriter, LogStream

#: A line of LAST_WORDS counts among the last ones until more lines than these have followed it: all threads' stacks.
_LAST_WORDS_LINES = 1000
#: Longest part of a line that a report repeats.
_TAIL_LINE_CHARACTERS = 2000


class Console(Protocol):
    """What a person sees of a job; nothing here may raise."""

    def lines(self, rank: int, stream: StreamName, texts: Sequence[str]) -> None:
        """Whole lines of a rank, without their ends; undecodable bytes are surrogate escapes."""
        ...

    def begin_line(self, rank: int, stream: StreamName, text: str) -> None:
        """What a rank has written of a line, for somebody to read while it waits; may come in several parts."""
        ...

    def end_line(self, rank: int, stream: StreamName, rest: str) -> None:
        """The rest of a line that was shown in part."""
        ...

    def go_on(self, rank: int, *, typed: bool) -> None:
        """A rank waits no more.

        Args:
            rank: rank that waits no more.
            typed: a person has typed a line, which the terminal has shown.
        """
        ...

    def note(self, text: str) -> None:
        """One line about the job itself."""
        ...


class BarDisplay(Protocol):
    """Where a rank's progress bar is shown while it runs."""

    def bar(self, rank: int, stream: StreamName, state: str | None) -> None:
        """The bar as it is now; None when its line is over or begins anew."""
        ...


class JobLog:
    """The logs and the index of a job, as one place that bytes go to; an error is told once and ends nothing.

    Args:
        files: the ranks' logs.
        index: index of which bytes came when.
        warn: callback that gets one line, should a log or the index become incomplete.
    """

    def __init__(self, files: LogFiles, index: IndexWriter, *, warn: Callable[[str], None]) -> None:
        self.files = files
        self._index = index
        self._warn = warn
        self._incomplete: set[int] = set()

    def append(self, rank: int, stream: LogStream, data: bytes, *, time_s: float) -> None:
        """Writes bytes to a rank's log and records when they came."""
        if rank in self._incomplete or not data:
            return
        try:
            offset = self.files.append(rank, data)
        except OSError as error:
            # A full disk must not end a job that may be about to save: its output still reaches the console.
            self.files.close(rank)
            self._incomplete.add(rank)
            self._warn(f"{self.files.path(rank)} is incomplete from here on: {error.strerror}")
            return
        try:
            self._index.add(time_s, rank, stream, offset, len(data))
        except OSError as error:
            self._warn(f"`dsrun logs` cannot order by time from here on: index file: {error.strerror}")

    def close(self) -> None:
        """Ends all logs."""
        self.files.close_all()
        self._index.close()


class RankOutput:
    """Takes a rank's frames in order, over all attempts of the job.

    The log holds every byte of both streams in order of arrival, bars and a missing last newline included; only
    the lines are folded.

    Args:
        rank: number of the rank.
        log: log that gets every byte of the rank.
        console: console that gets the whole lines.
        bars: shows bars as they run; without it their state becomes a line now and then.
    """

    def __init__(self, rank: int, log: JobLog, console: Console, *, bars: BarDisplay | None = None) -> None:
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        #: By which of LAST_WORDS it has: the last such line, and how many lines came up to it.
        self._last_words: dict[str, tuple[int, str]] = {}
        self._line_count = 0
        self._rank = rank
        self._log = log
        self._console = console
        self._bars = bars
        self._at_line_start = True
        self._heading: str | None = None
        self._has_exited = False
        # What the console shows of lines that have no end yet.
        self._begun: dict[StreamName, bytes] = {}
        interval_s = BAR_INTERVAL_S if bars is None else float("inf")
        self._lines: dict[StreamName, LineAssembler] = {
            "stdout": LineAssembler(bar_interval_s=interval_s),
            "stderr": LineAssembler(bar_interval_s=interval_s),
        }

    @property
    def tail(self) -> tuple[str, ...]:
        """The rank's last lines; what torch ended it with comes first, however many stacks were written after it."""
        since = self._line_count - _LAST_WORDS_LINES
        said = sorted({told for told in self._last_words.values() if told[0] > since and told[1] not in self._tail})
        return (*(line for _, line in said), *self._tail)

    def begin(self, heading: str) -> None:
        """Goes on with another attempt.

        Args:
            heading: one line that divides its output from what was before; written when there is output.
        """
        self._heading = heading
        self._has_exited = False
        # An earlier attempt's last words must not be taken for this one's.
        self._tail.clear()
        self._last_words.clear()

    def exited(self) -> None:
        """Takes its bars away: nothing moves them any more. What its children still write may come."""
        self._has_exited = True
        for name, assembler in self._lines.items():
            self._show_bar(name, None, had_bar=assembler.bar is not None)

    def take(self, frame: Output) -> None:
        """Writes a frame to the log and shows the lines that it completes."""
        if self._heading is not None:
            self._write_line(self._heading, time_s=frame.time_s)
            self._heading = None
        data = frame.text.encode("utf-8", "surrogateescape")
        self._log.append(self._rank, frame.stream, data, time_s=frame.time_s)
        self._at_line_start = data.endswith(b"\n")
        assembler = self._lines[frame.stream]
        had_bar = assembler.bar is not None
        self._deliver(frame.stream, assembler.feed(data, now_s=frame.time_s))
        if not self._has_exited:
            self._show_bar(frame.stream, assembler.bar, had_bar=had_bar)

    def show_begun(self) -> None:
        """Shows what was written of a line, a prompt for example: the rank may be waiting for an answer to it."""
        for name, assembler in self._lines.items():
            shown = self._begun.get(name, b"")
            if len(assembler.begun) > len(shown):
                self._console.begin_line(self._rank, name, _text(assembler.begun[len(shown) :]))
                self._begun[name] = assembler.begun

    def go_on(self, *, typed: bool) -> None:
        """The rank waits no more.

        Args:
            typed: a person has typed a line, which ends the one that the console shows; the log has only what the rank
                wrote.
        """
        if typed:
            for name in list(self._begun):
                self._keep(self._lines[name].finish())
            self._begun.clear()
        self._console.go_on(self._rank, typed=typed)

    def finish(self, *, last_word: str | None = None) -> None:
        """Shows what was left without an end of line, and gives the log's descriptor back.

        Args:
            last_word: text that the rank left outside its streams, None for none; it goes to the log, on lines of its
                own.
        """
        for name, assembler in self._lines.items():
            self._show_bar(name, None, had_bar=assembler.bar is not None)
            self._deliver(name, assembler.finish())
        if last_word is not None:
            self._write_line(last_word, time_s=time.time())
        self._log.files.close(self._rank)

    def _show_bar(self, stream: StreamName, state: str | None, *, had_bar: bool) -> None:
        if self._bars is not None and (had_bar or state is not None):
            self._bars.bar(self._rank, stream, state)

    def _deliver(self, stream: StreamName, lines: Sequence[str]) -> None:
        if not lines:
            return
        self._keep(lines)
        begun = self._begun.pop(stream, b"")
        first = lines[0].encode("utf-8", "surrogateescape")
        if begun and first.startswith(begun):
            self._console.end_line(self._rank, stream, _text(first[len(begun) :]))
            lines = lines[1:]
        if lines:
            self._console.lines(self._rank, stream, lines)

    def _keep(self, lines: Sequence[str]) -> None:
        """Remembers lines for a report."""
        if lines:
            self._tail.extend([line[:_TAIL_LINE_CHARACTERS] for line in lines[-TAIL_LINES:]])
            text = "\n".join(lines)
            for words in LAST_WORDS:
                if words in text:
                    self._note_last_words(words, lines)
            self._line_count += len(lines)

    def _note_last_words(self, words: str, lines: Sequence[str]) -> None:
        number, line = next((n, line) for n, line in reversed(list(enumerate(lines, 1))) if words in line)
        self._last_words[words] = (self._line_count + number, line[:_TAIL_LINE_CHARACTERS])

    def _write_line(self, text: str, *, time_s: float) -> None:
        line = text if self._at_line_start else f"\n{text}"
        self._log.append(self._rank, "dsrun", line.encode("utf-8", "replace") + b"\n", time_s=time_s)
        self._at_line_start = True


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
