"""A problem with its place: the line it stands on and a caret below. Knows no grammar.

What files and command lines hold is shown, never sent: characters that move a cursor become `?`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsrun.errors import Problem
from dsrun.units import format_list

_WIDEST = 100


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is written: line and column count from 1, `width` characters long; 0 where that is not known."""

    line: int
    column: int
    width: int = 1

    def part(self, start: int, width: int | None) -> Place:
        """Returns a piece of this place, `start` characters in; without a width, its rest."""
        if self.width == 0:  # what was read is not what is written there, so offsets mean nothing
            return self
        start = min(start, self.width)
        return Place(self.line, self.column + start, max(1, self.width - start if width is None else width))


class Misread(Exception):
    """A piece of text that is not what it should be; its reader knows what, its caller knows where.

    Args:
        message: description of what is wrong, without a place.
        hint: the way out.
        start: offset in the text that was read.
        width: characters from there; None means to its end.
    """

    def __init__(self, message: str, hint: str, *, start: int = 0, width: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.start = start
        self.width = width


def point_at(source: str, line: str, *, column: int, width: int, message: str, hint: str) -> Problem:
    """Returns `source: message`, the line below it, and a caret under the column; a long line is cut around it.

    Args:
        source: file and line, or the option, with the column: `hosts:3:7`, `--include:4`.
        line: the whole line.
        column: number of the column, from 1; it may be one behind the end of the line.
        width: number of characters to mark, from `column` on.
        message: description of what is wrong at that column.
        hint: the way out.
    """
    first = max(0, column - 1 - _WIDEST // 2) if len(line) > _WIDEST else 0
    cut = line[first : first + _WIDEST]
    offset = column - 1 - first
    tail = "~" * (min(width, len(cut) - offset) - 1)
    return Problem(f"{source}: {message}\n  {_printable(cut)}\n  {' ' * offset}^{tail}", hint)


def quoted(text: str) -> str:
    """Returns text of a user as messages name it: printable, not endless, between back-ticks."""
    return f"`{_printable(text if len(text) <= 60 else text[:57] + '...')}`"


def listed(names: list[str], *, most: int = 3) -> str:
    """Returns `a`, `b`, `c` and how many more."""
    return format_list([quoted(name) for name in names], most)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in text)
