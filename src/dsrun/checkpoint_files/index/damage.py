"""Values of JSON that somebody else wrote, taken only where they are what they should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: No offset, size or count is larger, so that sums and products stay small numbers.
LARGEST = 1 << 62
_SHOWN = 80


class DamageError(Exception):
    """A value is not what it should be; the text names its place and what was expected."""


def an_object(value: Any, place: str) -> Mapping[str, Any]:
    """Returns `value`, which is to be an object.

    Raises:
        DamageError: it is none.
    """
    if not isinstance(value, dict):
        raise DamageError(f"{place} is {shown(value)}; expected an object")
    return value


def a_list(value: Any, place: str) -> list[Any]:
    """Returns `value`, which is to be a list.

    Raises:
        DamageError: it is none.
    """
    if not isinstance(value, list):
        raise DamageError(f"{place} is {shown(value)}; expected a list")
    return value


def a_text(value: Any, place: str) -> str:
    """Returns `value`, which is to be a text.

    Raises:
        DamageError: it is none.
    """
    if not isinstance(value, str):
        raise DamageError(f"{place} is {shown(value)}; expected a text")
    return value


def a_number(value: Any, place: str, *, at_least: int = 0) -> int:
    """Returns `value`, which is to be a whole number from `at_least` to `LARGEST`.

    Raises:
        DamageError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= LARGEST:
        raise DamageError(f"{place} is {shown(value)}; expected a whole number of {at_least} or more")
    return value


def some_numbers(value: Any, place: str) -> tuple[int, ...]:
    """Returns `value`, which is to be a list of whole numbers from 0 to `LARGEST`.

    Raises:
        DamageError: it is none.
    """
    return tuple(a_number(item, f"{place}[{number}]") for number, item in enumerate(a_list(value, place)))


def a_member(value: Mapping[str, Any], key: str, place: str) -> Any:
    """Returns `value[key]`.

    Raises:
        DamageError: there is none.
    """
    if key not in value:
        raise DamageError(f"{place or 'it'} has no `{key}`")
    return value[key]


def shown(value: object) -> str:
    """Returns a value as a message shows it: not more than a line of it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return "a number out of all bounds"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
