"""The console shows what was asked for, in order, once; what moves stays at the bottom and is gone at the end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from dsrun.launcher.console.live import JobConsole, terminal_console
from dsrun.launcher.console.printer import Printer
from dsrun.launcher.console.progress_line import RecordTail
from dsrun.launcher.console.status_area import StatusArea
from support.screen import Screen


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Stage:
    """A console on a screen, or on a pipe where there is none."""

    def __init__(
        self,
        *,
        ranks: int = 4,
        shown: frozenset[int] | None = None,
        hosts: tuple[str, ...] | None = None,
        terminal: bool = False,
        records: Path | None = None,
        columns: int = 40,
    ) -> None:
        self.screen = Screen(columns, 24)
        self.clock = Clock()
        area = StatusArea(self.screen.size) if terminal else None
        printer = Printer(
            stdout=self.screen,
            stderr=self.screen,
            hosts=hosts or ("localhost",) * ranks,
            around=(lambda text: text) if area is None else area.around,
        )
        self.console = JobConsole(
            printer,
            shown=frozenset(range(ranks)) if shown is None else shown,
            area=area,
            records=None if records is None else RecordTail(records),
            clock=self.clock,
        )

    def after(self, seconds: float) -> list[str]:
        """What stands on the screen when the time has passed and the console had its tick."""
        self.clock.now_s += seconds
        self.console.tick(self.clock.now_s)
        return self.screen.text()


def test_a_line_of_all_ranks_is_shown_once_at_once() -> None:
    stage = Stage()
    for rank in range(4):
        stage.console.lines(rank, "stdout", ["loading", "ready"])
    assert stage.screen.text() == ["[0-3] loading", "[0-3] ready"]


def test_a_line_of_some_ranks_is_shown_after_a_moment_that_tick_announces() -> None:
    stage = Stage(ranks=8)
    for rank in (0, 2, 3):
        stage.console.lines(rank, "stdout", ["same"])
    stage.console.lines(1, "stdout", ["other"])
    assert stage.screen.text() == []
    assert stage.console.tick(stage.clock.now_s) == pytest.approx(stage.clock.now_s + 0.1)
    assert stage.after(0.1) == ["[0,2-3] same", "[1] other"]
    assert stage.console.tick(stage.clock.now_s) is None


def test_a_job_of_one_rank_waits_for_nobody() -> None:
    stage = Stage(ranks=1)
    stage.console.lines(0, "stdout", ["a"])
    assert stage.screen.text() == ["[0] a"]


def test_over_hosts_common_lines_name_ranks_and_others_the_host_too() -> None:
    stage = Stage(ranks=2, hosts=("w0", "w1"))
    stage.console.lines(0, "stdout", ["same", "mine"])
    stage.console.lines(1, "stdout", ["same"])
    assert stage.after(1) == ["[0-1] same", "[w0:0] mine"]


def test_only_the_ranks_asked_for_are_shown() -> None:
    stage = Stage(shown=frozenset({1, 3}), terminal=True)
    for rank in range(4):
        stage.console.lines(rank, "stdout", ["same"])
        stage.console.bar(rank, "stderr", f"{rank}0%")
    assert stage.after(0) == ["[1,3] same", "[1] 10%", "[3] 30%"]


def test_notes_and_reports_come_after_what_was_held_before_them() -> None:
    stage = Stage()
    stage.console.lines(0, "stdout", ["a"])
    stage.console.note("stopping")
    stage.console.lines(0, "stdout", ["b"])
    stage.console.report(["error: x"])
    stage.console.lines(0, "stdout", ["c"])
    stage.console.warning("warning: y")
    assert stage.screen.text() == ["[0] a", "dsrun: stopping", "[0] b", "error: x", "[0] c", "warning: y"]


def test_a_flood_is_printed_as_it_comes_after_what_was_held() -> None:
    stage = Stage(columns=80)
    stage.console.lines(1, "stdout", ["held"])
    stage.console.lines(0, "stdout", [str(number) for number in range(1000)])
    assert stage.screen.text() == ["[1] held", *(f"[0] {number}" for number in range(1000))]


def test_bars_have_one_row_a_rank_below_the_lines() -> None:
    stage = Stage(terminal=True)
    stage.console.bar(1, "stderr", "10%|#    |")
    stage.console.bar(0, "stderr", "20%|##   |")
    assert stage.after(0) == ["[0] 20%|##   |", "[1] 10%|#    |"]
    stage.console.bar(1, "stderr", "30%|###  |")
    stage.console.note("hm")
    assert stage.screen.text() == ["dsrun: hm", "[0] 20%|##   |", "[1] 10%|#    |"]
    assert stage.after(0.1) == ["dsrun: hm", "[0] 20%|##   |", "[1] 30%|###  |"]
    stage.console.bar(0, "stderr", None)
    assert stage.after(0.1) == ["dsrun: hm", "[1] 30%|###  |"]
    stage.console.close()
    assert stage.screen.text() == ["dsrun: hm"]


def test_rows_are_drawn_ten_times_a_second_at_most() -> None:
    stage = Stage(terminal=True)
    drawn: list[float] = []
    for percent in range(100):
        stage.console.bar(0, "stderr", f"{percent}%")
        before = stage.screen.text()
        if stage.after(0.01) != before:
            drawn.append(stage.clock.now_s)
    assert 9 <= len(drawn) <= 11


def test_of_many_bars_the_rest_is_counted() -> None:
    stage = Stage(ranks=11, terminal=True)
    for rank in range(11):
        stage.console.bar(rank, "stderr", "x")
    assert stage.after(0) == [*(f"[{rank}] x" for rank in range(8)), "and 3 more"]


def test_progress_is_read_from_the_records_and_erased_at_the_end(tmp_path: Path) -> None:
    stage = Stage(terminal=True, records=tmp_path)
    assert stage.after(0) == []
    record = {"event": "step", "step": 3, "loss": 2.5, "total_steps": 10, "seconds": 2.0}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    stage.console.bar(0, "stderr", "30%")
    assert stage.after(0.5) == ["[0] 30%", "step 3/10  loss 2.5  ETA 14.0s"]
    stage.console.close()
    assert stage.screen.text() == []


def test_what_is_held_at_the_end_is_printed() -> None:
    stage = Stage()
    stage.console.lines(0, "stdout", ["last words"])
    stage.console.close()
    stage.console.lines(1, "stdout", ["late"])
    assert stage.screen.text() == ["[0] last words", "[1] late"]


class Streams:
    """This process's stdout and stderr, for a while on a terminal or a pipe of the test's own."""

    def __init__(self, *, terminal: bool) -> None:
        self._ours, self.theirs = pty.openpty() if terminal else os.pipe()
        self.written = b""

    def __enter__(self) -> Streams:
        self._saved = [os.dup(1), os.dup(2)]
        os.dup2(self.theirs, 1)
        os.dup2(self.theirs, 2)
        return self

    def __exit__(self, *_: object) -> None:
        for number, descriptor in enumerate(self._saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(self.theirs)
        # A terminal whose other end is closed says so with an error, a pipe with nothing.
        with suppress(OSError):
            while data := os.read(self._ours, 10_000):
                self.written += data
        os.close(self._ours)

    def console(self, ranks: int = 1, *, quiet: bool = False, term: str = "xterm", of: Path | None) -> JobConsole:
        return terminal_console(
            hosts=["localhost"] * ranks,
            quiet=quiet,
            stdout_is_data=False,
            environ={"TERM": term},
            on_closed=lambda: None,
            keep_waiting=lambda: True,
            progress_of=of,
        )


@pytest.mark.parametrize(
    ("on_terminal", "quiet", "asked", "term", "moves"),
    [
        (True, False, True, "xterm", True),
        (True, True, True, "xterm", False),
        (True, False, False, "xterm", False),
        (True, False, True, "dumb", False),
        (False, False, True, "xterm", False),
    ],
)
def test_rows_are_for_terminals_and_for_those_who_want_them(
    tmp_path: Path, on_terminal: bool, quiet: bool, asked: bool, term: str, moves: bool
) -> None:
    with Streams(terminal=on_terminal) as streams:
        console = streams.console(quiet=quiet, term=term, of=tmp_path if asked else None)
        assert console.shows_bars is moves
        if moves:
            fcntl.ioctl(streams.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 10, 0, 0))
        console.bar(0, "stderr", "a bar that is wider")
        console.tick(1e9)
        console.lines(0, "stdout", ["line"])
        console.close()
    assert ("a ba…".encode() in streams.written) is moves
    screen = Screen(10, 24)
    screen.write(streams.written)
    assert screen.text() == ["[0] line"]


@pytest.mark.parametrize(
    ("on_terminal", "lines"), [(True, ["[0-1] same", "[1] other"]), (False, ["[0] same", "[1] same", "[1] other"])]
)
def test_a_program_that_reads_the_lines_finds_those_of_every_rank(on_terminal: bool, lines: list[str]) -> None:
    with Streams(terminal=on_terminal) as streams:
        console = streams.console(ranks=2, of=None)
        console.lines(0, "stdout", ["same"])
        console.lines(1, "stdout", ["same", "other"])
        console.close()
    screen = Screen(80, 24)
    screen.write(streams.written)
    assert screen.text() == lines
