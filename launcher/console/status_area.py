"""A few rows at the bottom of a terminal, drawn again and again below lines that stay. Returns text, writes none.

The cursor rests at the end of the last row. Everything that is printed meanwhile goes through `around`, which takes the
rows away and puts them back in the same write, so that nothing is torn and nothing flickers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?", re.DOTALL)
_TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[K", "\x1b[J"


class StatusArea:
    """The rows.

    Args:
        size: function that returns the present number of columns and lines of the terminal.
    """

    def __init__(self, size: Callable[[], tuple[int, int]]) -> None:
        self._size = size
        self._rows: list[str] = []
        # As drawn, each with the columns it takes.
        self._drawn: list[int] = []

    def redraw(self, rows: Sequence[str]) -> str:
        """Returns what puts other rows in place of those that are drawn.

        Args:
            rows: plain text, cut to the terminal's width here; those that the terminal has no lines for are left out.
        """
        self._rows = list(rows)
        text = self._to_first_row()
        # Each row is written over the old one and then cleared to its end: no moment with nothing in it.
        text += f"{_TO_END_OF_LINE}\n".join(self._fitted()) + (_TO_END_OF_LINE if rows else "")
        return text + _TO_END_OF_SCREEN

    def around(self, text: str) -> str:
        """Returns what prints `text`, whole lines, above the rows."""
        if not self._drawn:
            return text
        erase = self._to_first_row() + _TO_END_OF_SCREEN
        return erase + text + "\n".join(self._fitted())

    def erase(self) -> str:
        """Returns what takes the rows away; afterwards there are none."""
        if not self._drawn:
            return ""
        text = self._to_first_row() + _TO_END_OF_SCREEN
        self._rows, self._drawn = [], []
        return text

    def _to_first_row(self) -> str:
        if not self._drawn:
            return ""
        columns = self._size()[0]
        # A terminal that has become narrower has broken rows in two; each then takes several lines.
        lines = sum(max(1, -(-cells // columns)) for cells in self._drawn)
        return "\r" if lines == 1 else f"\r\x1b[{lines - 1}A"

    def _fitted(self) -> list[str]:
        columns, lines = self._size()
        # The last column stays free: a full row would move the cursor, on some terminals only.
        rows = [fit(row, max(1, columns - 1)) for row in self._rows[-max(1, lines - 1) :]]
        self._drawn = [cells(row) for row in rows]
        return rows


def fit(text: str, columns: int) -> str:
    """Returns plain text of at most so many columns, with an ellipsis where it was cut; escapes are taken out."""
    text = plain(text)
    if cells(text) <= columns:
        return text
    kept: list[str] = []
    used = 0
    for character in text:
        used += _cells_of(character)
        if used > columns - 1:
            break
        kept.append(character)
    return "".join(kept) + "…"


def plain(text: str) -> str:
    """Returns text that moves no cursor: no escapes, no control characters, no undecodable bytes."""
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPE.sub("", text)
    return "".join(
        " " if character == "\t" else "\ufffd" if _is_control(character) else character for character in text
    )


def cells(text: str) -> int:
    """Returns how many columns a terminal gives to plain text."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
