"""Rows of many hosts -> what all have in common, and how they differ. Pure; how it is drawn stands in `table.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..table_rows import Row, RowKind

#: What stands for a row that a host does not have.
NOTHING = "-"

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Share:
    """A value and the hosts that have it; `odd` where most hosts have another."""

    value: str
    hosts: tuple[str, ...]
    odd: bool


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """One row of all hosts; the value of most comes first. With one share they are all alike."""

    section: str
    label: str
    shares: tuple[Share, ...]

    def value_of(self, host: str) -> Share:
        """Returns what a host has."""
        return next(share for share in self.shares if host in share.hosts)


def fold_rows(rows: Mapping[str, Sequence[Row]], *, own: bool = False) -> list[FoldedRow]:
    """Puts the rows of all hosts together.

    Args:
        rows: rows of each host, by host name; not empty.
        own: whether rows that differ by nature (names, addresses) are there too.

    Returns:
        rows in reading order. What changes from moment to moment is one share with the smallest and the largest value.
    """
    tables = {host: _by_key(found) for host, found in rows.items()}
    folded: list[FoldedRow] = []
    for key in _in_order(tables.values()):
        found = {host: table.get(key) for host, table in tables.items()}
        some = next(row for row in found.values() if row is not None)
        if some.kind is RowKind.NOW:
            folded.append(FoldedRow(key[0], key[1], (Share(_span(found), tuple(found), odd=False),)))
        elif some.kind is RowKind.FACT or own:
            values = {host: NOTHING if row is None else _shown(row, own) for host, row in found.items()}
            folded.append(FoldedRow(key[0], key[1], _shares(values, differ=some.kind is RowKind.FACT)))
    return folded


def group_hosts(rows: Sequence[FoldedRow], hosts: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the hosts in groups whose members are alike in every row, the largest first."""
    found: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        found.setdefault(tuple(row.value_of(host).value for row in rows), []).append(host)
    return sorted((tuple(members) for members in found.values()), key=len, reverse=True)


def _by_key(rows: Sequence[Row]) -> dict[_Key, Row]:
    """Numbers rows of one name, so that the second is compared with the second."""
    seen: Counter[tuple[str, str]] = Counter()
    table: dict[_Key, Row] = {}
    for row in rows:
        name = (row.section, row.label)
        table[(*name, seen[name])] = row
        seen[name] += 1
    return table


def _in_order(tables: Iterable[Mapping[_Key, Row]]) -> list[_Key]:
    """Returns all keys in reading order: one that only later hosts have comes at the end of its section."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    sections = list(dict.fromkeys(key[0] for key in keys))
    return sorted(keys, key=lambda key: sections.index(key[0]))


def _shown(row: Row, own: bool) -> str:
    return row.value if own and row.kind is RowKind.OWN else row.shared


def _shares(values: Mapping[str, str], *, differ: bool) -> tuple[Share, ...]:
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    ordered = sorted(hosts.items(), key=lambda item: len(item[1]), reverse=True)
    most = len(ordered[0][1])
    # Without a majority nobody is right: all are marked.
    is_usual = most * 2 > len(values)
    return tuple(
        Share(value, tuple(members), odd=differ and len(ordered) > 1 and not (is_usual and index == 0))
        for index, (value, members) in enumerate(ordered)
    )


def _span(found: Mapping[str, Row | None]) -> str:
    known = sorted(((row.order, row.shared, host) for host, row in found.items() if row is not None))
    (_, low, lowest), (_, high, highest) = known[0], known[-1]
    return low if low == high else f"{low} ({lowest}) to {high} ({highest})"
