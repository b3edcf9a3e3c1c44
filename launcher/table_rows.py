"""A row of a table about a host, and the words rows are made of. Knows nothing of what a host has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from dsrun.units import format_bytes

_NAME = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


class RowKind(Enum):
    """What it means that two hosts differ in a row."""

    #: They are not alike, and somebody should know.
    FACT = auto()
    #: Nothing: it is another value every moment.
    NOW = auto()
    #: Nothing: names, addresses and numbers of parts differ by nature.
    OWN = auto()


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        section: `cpu`; rows of one stand together.
        label: `cores`.
        value: value as the table of one host shows it.
        kind: kind of the value, which says what a difference between hosts means; see `RowKind`.
        brief: the value without what is this host's own, or of this moment, for a view of many hosts; None is `value`.
        order: number by which the values of hosts in a `NOW` row are sorted, smallest first.
    """

    section: str
    label: str
    value: str
    kind: RowKind = RowKind.FACT
    brief: str | None = None
    order: float = 0.0

    @property
    def shared(self) -> str:
        """The value as a view of many hosts has it."""
        return self.value if self.brief is None else self.brief


def size_text(count: int | None) -> str:
    """Returns bytes as text; `?` where they are not known."""
    return "?" if count is None else format_bytes(count)


def in_brackets(parts: Sequence[str]) -> str:
    """Returns ` (one, other)`, or nothing."""
    return f" ({', '.join(parts)})" if parts else ""


def number_ranges(numbers: Iterable[int]) -> str:
    """Returns `0-3,6` for 0, 1, 2, 3 and 6."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def fold_names(names: Sequence[str]) -> str:
    """Returns names in few words, as a hostfile could have them: `n[01-15],login`."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    order: list[str | tuple[str, str, int]] = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            order.append(name)
            continue
        before, digits, after = match.groups()
        # `n1` and `n01` are two hosts: with zeros in front the width is part of the name.
        padded = len(digits) > 1 and digits[0] == "0"
        key = (before, after, len(digits) if padded or (before, after, len(digits)) in groups else 0)
        if key not in groups:
            order.append(key)
        groups.setdefault(key, []).append(int(digits))
    return ",".join(part if isinstance(part, str) else _name_range(*part, groups[part]) for part in order)


def _name_range(before: str, after: str, width: int, numbers: Sequence[int]) -> str:
    ranges = re.sub(r"[0-9]+", lambda match: match.group().zfill(width), number_ranges(numbers))
    return f"{before}[{ranges}]{after}" if len(numbers) > 1 else f"{before}{ranges}{after}"
