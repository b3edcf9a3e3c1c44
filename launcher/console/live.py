"""What a person sees of a running job: lines of the ranks they asked for, bars and progress below. Starts nothing.

Puts together what other modules know: which ranks are shown, which lines are the same (`collapse.py`), how
rows at the bottom are drawn (`status_area.py`), how training goes (`progress_line.py`); and hands lines to the
`Printer`.

[Note: the order on the console] Lines of ranks may be held for a moment, notes and reports never: they take along
what is held before them, so that everything stands in the order in which it came.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..protocol import StreamName
from .collapse import HeldLine, LineCollapser
from .printer import PatientStream, Printer, wants_colour
from .progress_line import ProgressLine, RecordTail
from .status_area import StatusArea

#: Least time between two drawings of the rows at the bottom, lines that push them along excepted.
_DRAW_INTERVAL_S = 0.1
#: Between two looks at the runtime's records.
_PROGRESS_INTERVAL_S = 0.5
#: Most bars shown at once; the rest is counted.
_MOST_BARS = 8


class JobConsole:
    """Lines, notes and moving rows of one job.

    Args:
        printer: printer of all lines and notes; its texts must pass through `area.around`.
        shown: ranks whose lines and bars are shown.
        collapse: whether a line that several ranks have in common is printed once.
        area: the rows at the bottom; None where there is no terminal.
        records: reader of the runtime's records, for the progress row; None to show none.
        clock: seconds, never going back; the session's `tick` goes by the same.
    """

    def __init__(
        self,
        printer: Printer,
        *,
        shown: frozenset[int],
        collapse: bool = True,
        area: StatusArea | None = None,
        records: RecordTail | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._printer = printer
        self._shown = shown
        self._collapser = LineCollapser(len(shown)) if collapse and len(shown) > 1 else None
        self._area = area
        self._records = records if area is not None else None
        self._clock = clock
        self._progress = ProgressLine()
        self._bars: dict[tuple[int, StreamName], str] = {}
        self._is_stale = False
        self._next_draw_s = 0.0
        self._next_look_s = 0.0

    @property
    def shows_bars(self) -> bool:
        """Whether bars are shown as they run, by `bar`; else their state becomes a line now and then."""
        return self._area is not None

    @property
    def closed(self) -> bool:
        """Whether nobody reads any more."""
        return self._printer.closed

    # --- what stays

    def lines(self, rank: int, stream: StreamName, texts: Sequence[str]) -> None:
        """Shows whole lines of a rank, if it is one of those asked for."""
        if rank not in self._shown:
            return
        if self._collapser is None:
            self._printer.lines(rank, stream, texts)
            return
        now_s = self._clock()
        if self._collapser.passes(len(texts), now_s=now_s):
            self._print(self._collapser.take())
            self._printer.lines(rank, stream, texts)
        else:
            self._collapser.add(rank, stream, texts, now_s=now_s)
            self._print(self._collapser.take_due(now_s))

    def begin_line(self, rank: int, stream: StreamName, text: str) -> None:
        """Shows a part of a line, in place of what moves: the cursor stays behind it."""
        if rank not in self._shown:
            return
        self._let_go()
        if self._area is not None:
            self._printer.raw(self._area.erase())
            self._is_stale = True
        self._printer.begin_line(rank, stream, text)

    def end_line(self, rank: int, stream: StreamName, rest: str) -> None:
        """Shows the rest of such a line."""
        if rank in self._shown:
            self._let_go()
            self._printer.end_line(rank, stream, rest)

    def go_on(self, rank: int, *, typed: bool) -> None:
        """See `Printer.go_on`."""
        self._printer.go_on(rank, typed=typed)

    def note(self, text: str) -> None:
        """Shows a line of dsrun's own talk."""
        self._let_go()
        self._printer.note(text)

    def warning(self, text: str) -> None:
        """Shows a `warning:` about what the user gave."""
        self._let_go()
        self._printer.warning(text)

    def report(self, lines: Sequence[str]) -> None:
        """Shows an `error:` report."""
        self._let_go()
        self._printer.report(lines)

    # --- what moves

    def bar(self, rank: int, stream: StreamName, state: str | None) -> None:
        """Shows a rank's bar as it is now; None takes it away."""
        if rank not in self._shown or self._bars.get((rank, stream)) == state:
            return
        if state is None:
            del self._bars[rank, stream]
        else:
            self._bars[rank, stream] = state
        self._is_stale = True

    def tick(self, now_s: float) -> float | None:
        """Prints lines that were held long enough and draws what has moved; returns when there will be more to do."""
        wanted: list[float] = []
        if self._collapser is not None:
            self._print(self._collapser.take_due(now_s))
            if (due_s := self._collapser.due_s) is not None:
                wanted.append(due_s)
        if self._area is not None:
            wanted += self._move(self._area, now_s)
        return min(wanted, default=None)

    def close(self) -> None:
        """Prints what is held and takes away what moves; lines and notes can be shown afterwards."""
        self._let_go()
        self._collapser = None
        if self._area is not None:
            self._printer.raw(self._area.erase())
            self._area = None

    def _move(self, area: StatusArea, now_s: float) -> list[float]:
        wanted: list[float] = []
        if self._records is not None:
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _PROGRESS_INTERVAL_S
                for record in self._records.read():
                    self._progress.take(record)
                    self._is_stale = True
            wanted.append(self._next_look_s)
        if self._printer.is_mid_line:
            return wanted
        if self._is_stale and now_s >= self._next_draw_s:
            self._next_draw_s = now_s + _DRAW_INTERVAL_S
            self._is_stale = False
            self._printer.raw(area.redraw(self._rows()))
        if self._is_stale:
            wanted.append(self._next_draw_s)
        return wanted

    def _rows(self) -> list[str]:
        bars = [
            f"{self._printer.tags.text((rank,), coloured=False)} {self._bars[rank, name]}"
            for rank, name in sorted(self._bars)
        ]
        rows = bars[:_MOST_BARS]
        if len(bars) > _MOST_BARS:
            rows.append(f"and {len(bars) - _MOST_BARS} more")
        progress = self._progress.text()
        return [*rows, progress] if progress else rows

    def _let_go(self) -> None:
        """See [Note: the order on the console]."""
        if self._collapser is not None:
            self._print(self._collapser.take())

    def _print(self, held: Sequence[HeldLine]) -> None:
        """Prints lines in order, those of the same ranks in one write."""
        start = 0
        for end in range(1, len(held) + 1):
            if end == len(held) or not _go_together(held[start], held[end]):
                line = held[start]
                self._printer.lines_of(line.ranks, line.stream, [each.text for each in held[start:end]])
                start = end


def _go_together(line: HeldLine, other: HeldLine) -> bool:
    return line.stream == other.stream and line.ranks == other.ranks


def terminal_console(
    *,
    hosts: Sequence[str],
    quiet: bool,
    stdout_is_data: bool,
    environ: Mapping[str, str],
    on_closed: Callable[[], None],
    keep_waiting: Callable[[], bool],
    shown: frozenset[int] | None = None,
    progress_of: Path | None = None,
    collapse: bool | None = None,
) -> JobConsole:
    """Returns a console on this process's own stdout and stderr.

    Args:
        hosts: host of each rank, by rank.
        quiet: notes of dsrun, bars and progress are not shown.
        stdout_is_data: stdout is kept for one JSON object, and all lines go to stderr.
        environ: environment variables, for NO_COLOR, FORCE_COLOR and TERM.
        on_closed: callback for the moment when the reader of stdout or stderr has gone away; called once.
        keep_waiting: function asked whether to go on waiting while the reader does not read; False ends the write. See
            `PatientStream`.
        shown: ranks whose lines are shown; None for all.
        progress_of: folder of the job whose bars and progress are shown below the lines, where both streams are one
            terminal; None for none.
        collapse: whether a line that several ranks have in common is printed once. None does so only on a terminal: a
            program gets each rank's own lines, whatever the others print, and when.
    """
    out, err = 2 if stdout_is_data else 1, 2
    moves = progress_of is not None and not quiet and environ.get("TERM", "dumb") != "dumb" and _one_terminal(out, err)
    area = StatusArea(lambda: _size_of(err)) if moves else None
    printer = Printer(
        stdout=PatientStream(out, keep_waiting),
        stderr=PatientStream(err, keep_waiting),
        stdout_colour=wants_colour(environ, is_terminal=os.isatty(out)),
        stderr_colour=wants_colour(environ, is_terminal=os.isatty(err)),
        hosts=hosts,
        quiet=quiet,
        on_closed=on_closed,
        around=(lambda text: text) if area is None else area.around,
        one_place=os.path.sameopenfile(out, err),
        typed_on=_typed_on(out, err),
    )
    return JobConsole(
        printer,
        shown=frozenset(range(len(hosts))) if shown is None else shown,
        collapse=os.isatty(out) if collapse is None else collapse,
        area=area,
        records=None if progress_of is None else RecordTail(progress_of),
    )


def _typed_on(out: int, err: int) -> list[StreamName]:
    """Returns which streams are the terminal that dsrun's own stdin is."""
    streams: dict[StreamName, int] = {"stdout": out, "stderr": err}
    return [name for name, descriptor in streams.items() if _one_terminal(0, descriptor)]


def _one_terminal(first: int, second: int) -> bool:
    """Whether both descriptors are the same terminal: rows at its bottom must know of every line above them."""
    if not (os.isatty(first) and os.isatty(second)):
        return False
    return os.fstat(first).st_rdev == os.fstat(second).st_rdev


def _size_of(descriptor: int) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(descriptor)
    except OSError:
        # The terminal was closed; the next write will find out.
        return 80, 24
    # Serial lines and some containers say 0.
    return size.columns or 80, size.lines or 24
