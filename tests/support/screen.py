"""A small terminal: what stands on its screen after the bytes that were written to it. Knows what dsrun uses, no more.

Wide characters take two columns, a full row goes on in the next, and a screen that is full scrolls.
"""

from __future__ import annotations

import re
import unicodedata

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b|[\x00-\x1f]|[^\x00-\x1f\x1b]", re.DOTALL)


class Screen:
    """Rows of text and a cursor; an escape that is not known fails the test."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns = columns
        self.lines = lines
        #: Every row there ever was; the last `lines` of them are on the screen.
        self.rows: list[list[str]] = [[]]
        self.row = 0
        self.column = 0

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return self.columns, self.lines

    def write(self, data: bytes, /) -> int:
        """Shows bytes; returns how many, as a stream does."""
        for token in _TOKEN.finditer(data.decode("utf-8", "replace")):
            text, (argument, command) = token[0], token.groups(default="")
            if text == "\n":
                # A terminal's driver makes a carriage return of it as well.
                self._down()
                self.column = 0
            elif text == "\r":
                self.column = 0
            elif command == "A":
                self.row = max(self._top(), self.row - int(argument or 1))
            elif command == "K":
                assert argument in ("", "0")
                del self._cells()[self.column :]
            elif command == "J":
                assert argument in ("", "0")
                del self._cells()[self.column :]
                for row in self.rows[self.row + 1 :]:
                    row.clear()
            elif command != "m":
                assert text.isprintable(), f"the screen does not know {text!r}"
                self._put(text)
        return len(data)

    def narrow(self, columns: int) -> None:
        """Makes the terminal narrower as most do: rows that are too long are broken, the cursor stays with its text."""
        self.columns = columns
        broken: list[list[str]] = []
        for number, row in enumerate(self.rows):
            pieces = [row[start : start + columns] for start in range(0, len(row), columns)] or [[]]
            if number == self.row:
                cursor_row = len(broken) + min(self.column // columns, len(pieces) - 1)
            broken += pieces
        self.row, self.column = cursor_row, self.column % columns
        self.rows = broken

    def text(self) -> list[str]:
        """Everything that was ever shown, scrolled away or not, without empty rows at the end."""
        shown = ["".join(row).rstrip() for row in self.rows]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def _top(self) -> int:
        return max(0, len(self.rows) - self.lines)

    def _cells(self) -> list[str]:
        return self.rows[self.row]

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    def _put(self, character: str) -> None:
        if unicodedata.combining(character):
            return
        width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if self.column + width > self.columns:
            self._down()
            self.column = 0
        cells = self._cells()
        cells += [" "] * (self.column + width - len(cells))
        # The second half of a wide character is an empty cell.
        cells[self.column : self.column + width] = [character, *[""] * (width - 1)]
        self.column += width
