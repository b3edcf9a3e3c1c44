"""Rows at the bottom of a terminal never disturb the lines above them."""

from __future__ import annotations

import pytest

from dsrun.launcher.console.status_area import StatusArea, cells, fit, plain
from support.screen import Screen


class Terminal:
    """An area on a screen."""

    def __init__(self, columns: int = 20, lines: int = 6) -> None:
        self.screen = Screen(columns, lines)
        self.area = StatusArea(self.screen.size)

    def draw(self, *rows: str) -> list[str]:
        self.screen.write(self.area.redraw(rows).encode())
        return self.screen.text()

    def print(self, *lines: str) -> list[str]:
        self.screen.write(self.area.around("".join(f"{line}\n" for line in lines)).encode())
        return self.screen.text()

    def erase(self) -> list[str]:
        self.screen.write(self.area.erase().encode())
        return self.screen.text()


def test_lines_are_printed_above_the_rows() -> None:
    terminal = Terminal()
    terminal.print("before")
    assert terminal.draw("bar 1", "bar 2") == ["before", "bar 1", "bar 2"]
    assert terminal.print("one", "two") == ["before", "one", "two", "bar 1", "bar 2"]
    assert terminal.erase() == ["before", "one", "two"]
    assert terminal.print("after") == ["before", "one", "two", "after"]


def test_fewer_and_shorter_rows_leave_nothing_behind() -> None:
    terminal = Terminal()
    terminal.draw("a long bar", "second", "third")
    assert terminal.draw("short") == ["short"]
    assert terminal.draw() == []
    assert terminal.print("line") == ["line"]


def test_a_screen_that_scrolls_keeps_every_line_once() -> None:
    terminal = Terminal(lines=4)
    terminal.draw("bar 1", "bar 2")
    for number in range(20):
        terminal.print(f"line {number}", "x" * 30)
        terminal.draw(f"bar 1 at {number}", "bar 2")
    kept = [row for number in range(20) for row in (f"line {number}", "x" * 20, "x" * 10)]
    assert terminal.screen.text() == [*kept, "bar 1 at 19", "bar 2"]


def test_rows_are_cut_to_the_width_that_the_terminal_has_now() -> None:
    terminal = Terminal(columns=10)
    assert terminal.draw("0123456789abc") == ["01234567…"]
    terminal.screen.columns = 20
    assert terminal.draw("0123456789abc") == ["0123456789abc"]


def test_a_terminal_that_became_narrower_is_left_clean() -> None:
    terminal = Terminal(columns=20)
    terminal.print("line")
    terminal.draw("first bar, 18 wide", "bar 2")
    terminal.screen.narrow(10)
    assert terminal.print("more") == ["line", "more", "first ba…", "bar 2"]
    assert terminal.erase() == ["line", "more"]


def test_a_small_terminal_gets_the_last_rows() -> None:
    terminal = Terminal(lines=3)
    assert terminal.draw("a", "b", "c", "progress") == ["c", "progress"]
    assert terminal.print("line") == ["line", "c", "progress"]


def test_wide_characters_count_twice() -> None:
    terminal = Terminal(columns=10)
    assert terminal.draw("進捗進捗進捗", "é" + "e\u0301" * 8) == ["進捗進捗…", "é" + "e" * 8]
    assert terminal.print("line")[:1] == ["line"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[32m50%\x1b[0m done", "50% done"),
        ("\x1b[A\x1b]0;title\x07x", "x"),
        ("a\tb\0c\x1b", "a b\ufffdc"),
        ("bad \udcff", "bad \ufffd"),
        ("two\nlines", "two\ufffdlines"),
    ],
)
def test_nothing_in_a_row_moves_the_cursor(text: str, shown: str) -> None:
    assert plain(text) == shown


@pytest.mark.parametrize("columns", range(1, 12))
def test_a_row_never_takes_more_than_it_may(columns: int) -> None:
    for text in ("abcdefghijkl", "進捗進捗", "a進b捗", ""):
        assert cells(fit(text, columns)) <= columns
