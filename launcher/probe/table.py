"""Rows of one host, or of many -> lines of text, cut to the terminal's width. Prints nothing and asks nothing.

Of many hosts, what all have in common stands once; below it what differs: a column for each group of hosts that are
alike, or, where columns are too many for the terminal, a line for each value. What most hosts do not have is marked
with `!`, which needs no colour to be seen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ..console.status_area import plain
from ..table_rows import Row, fold_names
from .columns import FoldedRow, fold_rows, group_hosts

#: Of a column of a group of hosts; narrower ones break every version in two.
_LEAST_COLUMN = 18
#: Longer labels, of figures and variables, have a width of their own.
_WIDE_LABEL = 14
_GAP = "  "
_ODD = "! "
_COLOURS = {"red": "red", "amber": "yellow", "note": "cyan"}
_LEVELS = tuple(_COLOURS)

_Cell = tuple[str, bool]


def host_lines(rows: Sequence[Row], *, width: int) -> list[str]:
    """Draws the table of one host: section, label, value."""
    return _grid([(row.section, row.label, [(row.value, False)]) for row in rows], width=width)


def many_lines(rows: Mapping[str, Sequence[Row]], *, width: int, own: bool = False) -> list[str]:
    """Draws the table of many hosts.

    Args:
        rows: rows of each host, by host name in the order of the hosts; not empty.
        width: columns of the terminal.
        own: whether rows that differ by nature (names, addresses) are there too.
    """
    hosts = list(rows)
    folded = fold_rows(rows, own=own)
    same = [row for row in folded if len(row.shares) == 1]
    different = [row for row in folded if len(row.shares) > 1]
    lines = [_bold(_all_of(hosts))]
    lines += _grid([(row.section, row.label, [(row.shares[0].value, False)]) for row in same], width=width)
    if not different:
        return lines
    left = _left((row.section, row.label) for row in different)
    groups = group_hosts(different, hosts)
    labels = max(left.common, *left.wide.values(), 0)
    columns = (width - left.sections - labels - 2 * len(_GAP)) // len(groups) - len(_GAP)
    lines += ["", _bold("what differs")]
    if columns >= _LEAST_COLUMN:
        head = ("", "", [(fold_names(group), False) for group in groups])
        body = [(row.section, row.label, [_cell(row, group[0]) for group in groups]) for row in different]
        # The hosts' names are the head, however many rows they take.
        return lines + _grid([head, *body], width=width, head_rows=1)
    return lines + _grid([entry for row in different for entry in _listed(row)], width=width)


def verdict_lines(verdicts: Sequence[Mapping[str, Any]], *, width: int, notes: bool) -> list[str]:
    """Draws what is not as it should be, each with its way out, the worst first.

    Args:
        verdicts: `level`, `text` and `fix`; where there are several hosts, `hosts`.
        width: columns of the terminal.
        notes: show also what is only worth knowing; otherwise their number.
    """
    lines: list[str] = []
    shown = [verdict for verdict in verdicts if notes or verdict["level"] != "note"]
    for verdict in sorted(shown, key=lambda verdict: _LEVELS.index(verdict["level"])):
        level, hosts = verdict["level"], verdict.get("hosts", ())
        text = f"{fold_names(hosts)}: {verdict['text']}" if hosts else verdict["text"]
        first, *rest = _fold(text, width - 7)
        lines.append(click.style(level.ljust(7), fg=_COLOURS[level]) + first)
        lines += [" " * 7 + line for line in (*rest, *_fold(f"fix: {verdict['fix']}", width - 7))]
    left_out = len(verdicts) - len(shown)
    if left_out:
        lines.append(
            f"{left_out} {'note' if left_out == 1 else 'notes'}: `--all` shows {'it' if left_out == 1 else 'them'}"
        )
    return lines


def fold_verdicts(verdicts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Puts the verdicts of many hosts together: one that several have stands once, with their names."""
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for host, found in verdicts.items():
        for verdict in found:
            hosts.setdefault((verdict["level"], verdict["text"], verdict["fix"]), []).append(host)
    return [{"level": level, "text": text, "fix": fix, "hosts": names} for (level, text, fix), names in hosts.items()]


def _all_of(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"all {len(hosts)} hosts"


def _cell(row: FoldedRow, host: str) -> _Cell:
    share = row.value_of(host)
    return share.value, share.odd


def _listed(row: FoldedRow) -> Iterator[tuple[str, str, list[_Cell]]]:
    for place, share in enumerate(row.shares):
        cells = [(share.value, share.odd), (fold_names(share.hosts), False)]
        yield (row.section, row.label, cells) if place == 0 else (row.section, "", cells)


def _grid(rows: Sequence[tuple[str, str, list[_Cell]]], *, width: int, head_rows: int = 0) -> list[str]:
    """Draws rows of section, label and cells of equal width; a section stands in its first row alone."""
    if not rows:
        return []
    left = _left((section, label) for section, label, _ in rows)
    count = max(len(cells) for _, _, cells in rows)
    marked = any(odd for _, _, cells in rows for _, odd in cells)
    signs = count * (len(_ODD) if marked else 0) + (count - 1) * len(_GAP)
    lines: list[str] = []
    before = ""
    for place, (section, label, cells) in enumerate(rows):
        heads = ("" if section == before else section, plain(label))
        before = section
        # Rows of a section with long labels do not push all others to the right.
        label_width = max(left.common, left.wide.get(section, 0))
        column = max(8, (width - left.sections - label_width - 2 * len(_GAP) - signs) // count)
        folded = [_fold(value, column) for value, _ in cells]
        for line in range(max(map(len, folded))):
            first = heads if line == 0 else ("", "")
            parts = [_Part(first[0].ljust(left.sections), bold=True), _Part(first[1].ljust(label_width), dim=True)]
            for texts, (_, odd) in zip(folded, cells, strict=True):
                sign = "" if not marked else _ODD if odd and line == 0 else " " * len(_ODD)
                text = sign + (texts[line] if line < len(texts) else "").ljust(column)
                parts.append(_Part(text, bold=place < head_rows, colour="yellow" if odd else None))
            lines.append(_joined(parts))
    return lines


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    bold: bool = False
    dim: bool = False
    colour: str | None = None


def _joined(parts: Sequence[_Part]) -> str:
    """Puts a line together, without blanks at its end."""
    length = len(_GAP.join(part.text for part in parts).rstrip())
    line, at = "", 0
    for part in parts:
        text = part.text[: max(0, length - at)]
        at += len(part.text) + len(_GAP)
        if text:
            # None, not False: a style that is switched off explicitly is written as an escape too.
            styled = click.style(text, bold=part.bold or None, dim=part.dim or None, fg=part.colour)
            line += styled if text.strip() else text
            line += _GAP if at < length else ""
    return line


@dataclass(frozen=True, slots=True)
class _Left:
    """Widths of the first two columns; `wide` are those of labels in sections that are long, by section."""

    sections: int
    common: int
    wide: Mapping[str, int]


def _left(names: Iterable[tuple[str, str]]) -> _Left:
    longest: dict[str, int] = {}
    for section, label in names:
        longest[section] = max(longest.get(section, 0), len(plain(label)))
    usual = [length for length in longest.values() if length <= _WIDE_LABEL]
    wide = {section: length for section, length in longest.items() if length > _WIDE_LABEL}
    return _Left(sections=max(map(len, longest)), common=max(usual, default=0), wide=wide)


def _fold(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain(text), max(8, width), break_on_hyphens=False) or [""]


def _bold(text: str) -> str:
    return click.style(text, bold=True)
