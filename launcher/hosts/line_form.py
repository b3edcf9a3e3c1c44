"""The line form of a hostfile: text -> entries. Knows words, quotes and comments; not what the words mean.

    file := { line "\\n" }     line := [entry] [comment]     entry := HOST { blank+ KEY "=" VALUE }
    comment := "#" any         VALUE := word | "'" any but ' "'" | '"' any, with \\\\ \\" \\n \\r \\t '"'

A comment begins where a word could, so that values may hold a `#`, or right behind `slots=N` as DeepSpeed reads it.
"""

from __future__ import annotations

import re

from ..excerpts import Place, quoted
from .fields import Entry, Fault, Field

_GAP = re.compile(r"[ \t]*")
_ASSIGNED = re.compile(r"(?:[ \t]*=[ \t]*[^ \t]*)?")
_KEY = re.compile(r"([^ \t=\"'#]+)=")
_BARE = re.compile(r"[^ \t]*")
_SLOTS = re.compile(r"(slots=[0-9]+)#")
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n", "r": "\r", "t": "\t"}
_EXAMPLE = "a line reads `worker-0 slots=4 port=2222`"


class _Unclear(Exception):
    """A word that is not understood; reading goes on at `end`."""

    def __init__(self, fault: Fault, end: int) -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.end = end


def read_line(line: str, *, number: int) -> tuple[Entry | None, list[Fault]]:
    """Returns what a line says, None where it says nothing, and which of its words are not understood.

    Args:
        line: text of the line, without its line end.
        number: number of the line, from 1.
    """
    end = _gap(line, 0)
    if end == len(line) or line[end] == "#":
        return None, []
    host = _bare(line, end)
    host_at = Place(number, end + 1, len(host))
    fields: list[Field] = []
    faults: list[Fault] = []
    end += len(host)
    while True:
        last, end = end, _gap(line, end)
        if end == len(line) or line[end] == "#":
            return Entry(host, host_at, Place(number, last + 1), tuple(fields), broken=bool(faults)), faults
        if (slots := _SLOTS.match(line, end)) is not None:
            line = line[: slots.end(1)]
        try:
            field, end = _field(line, end, number)
            fields.append(field)
        except _Unclear as unclear:
            faults.append(unclear.fault)
            end = unclear.end


def _field(line: str, start: int, number: int) -> tuple[Field, int]:
    match = _KEY.match(line, start)
    if match is None:
        word = _bare(line, start)
        end = start + len(word)
        hint = _EXAMPLE
        if word == "slots" or word.isdigit():
            hint = "write `slots=4`, without blanks around `=`"
            end = _skip(_ASSIGNED, line, end)
        raise _Unclear(Fault(Place(number, start + 1, len(word)), f"{quoted(word)} is not understood", hint), end)
    key_at = Place(number, start + 1, len(match[1]))
    value, end = _value(line, match.end(), number)
    inside = int(line[match.end() : match.end() + 1] in ("'", '"') and end - match.end() > 2)
    value_at = Place(number, match.end() + inside + 1, max(1, end - match.end() - 2 * inside))
    return Field(match[1], value, key_at, value_at), end


def _value(line: str, start: int, number: int) -> tuple[str, int]:
    """Returns a value without its quotes, and the offset behind it."""
    quote = line[start : start + 1]
    if quote not in ("'", '"'):
        word = _bare(line, start)
        return word, start + len(word)
    match = (_SINGLE if quote == "'" else _DOUBLE).match(line, start)
    if match is None:
        fault = Fault(Place(number, start + 1), "this quote is not closed on its line", f"end it with `{quote}`")
        raise _Unclear(fault, len(line))
    if match.end() < len(line) and line[match.end()] not in " \t":
        rest = Place(number, match.end() + 1, len(_bare(line, match.end())))
        fault = Fault(rest, "there is more behind the closing quote", "quotes go around the whole value")
        raise _Unclear(fault, match.end() + rest.width)
    if quote == "'":
        return match[1], match.end()
    for escape in _ESCAPE.finditer(match[1]):
        if escape[1] not in _ESCAPES:
            at = Place(number, match.start(1) + escape.start() + 1, 2)
            hint = "write `\\\\` for a backslash, or use single quotes"
            raise _Unclear(Fault(at, f"{quoted(escape[0])} is no escape", hint), match.end())
    return _ESCAPE.sub(lambda escape: _ESCAPES[escape[1]], match[1]), match.end()


def _gap(line: str, start: int) -> int:
    return _skip(_GAP, line, start)


def _bare(line: str, start: int) -> str:
    return line[start : _skip(_BARE, line, start)]


def _skip(pattern: re.Pattern[str], line: str, start: int) -> int:
    match = pattern.match(line, start)
    assert match is not None, "the pattern matches the empty text"
    return match.end()
