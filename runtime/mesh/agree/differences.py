"""Where two values that JSON can hold differ first, in words. Pure: knows no ranks.

A list of `[name, value]` is read as named things in an order, so that a difference is found under its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

#: Short lists of plain values, such as shapes, are shown whole.
_SHORT = 8
#: Of a value that is shown.
_SHOWN_CHARACTERS = 120


class _Absent:
    """What stands where one of the two has nothing."""


_ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two values differ.

    Attributes:
        path: keys and `[numbers]` down to it, like `optimizer.params.lr`; empty for the whole.
        first: the one value there, as text.
        second: the other.
    """

    path: str
    first: str
    second: str


def first_difference(first: object, second: object) -> Difference | None:
    """Compares two values as JSON sees them; None where they are equal. Keys of objects have no order."""
    return _compare("", json.loads(json.dumps(first)), json.loads(json.dumps(second)))


def _compare(path: str, first: Any, second: Any) -> Difference | None:
    # 1, 1.0 and True are equal in python, and different in a config.
    if json.dumps(first, sort_keys=True, default=str) == json.dumps(second, sort_keys=True, default=str):
        return None
    if isinstance(first, dict) and isinstance(second, dict):
        ours, theirs = cast(dict[str, Any], first), cast(dict[str, Any], second)
        for key in sorted({*ours, *theirs}):
            found = _compare(f"{path}.{key}" if path else key, ours.get(key, _ABSENT), theirs.get(key, _ABSENT))
            if found is not None:
                return found
    if isinstance(first, list) and isinstance(second, list):
        return _compare_lists(path, cast(list[Any], first), cast(list[Any], second))
    return Difference(path, _shown(first), _shown(second))


def _compare_lists(path: str, first: list[Any], second: list[Any]) -> Difference | None:
    plain = not any(isinstance(each, (list, dict)) for each in [*first, *second])
    if plain and max(len(first), len(second)) <= _SHORT:
        return Difference(path, _shown(first), _shown(second))
    for number, pair in enumerate(zip_longest(first, second, fillvalue=cast(Any, _ABSENT))):
        ours, theirs = pair
        name, other = _name_of(ours), _name_of(theirs)
        if name and name == other:
            found = _compare(f"{path}.{name}" if path else name, ours[1], theirs[1])
        else:
            found = _compare(f"{path}[{number}]", name or ours, other or theirs)
        if found is not None:
            return found
    return None


def _name_of(value: Any) -> str:
    """Returns the name of a `[name, value]`; empty for anything else."""
    pair = cast(list[Any], value) if isinstance(value, list) else []
    return pair[0] if len(pair) == 2 and isinstance(pair[0], str) else ""


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
