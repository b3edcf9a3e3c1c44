"""State of a schedule as JSON values and back: JSON has no dicts with keys that are no text, and torch's have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ITEMS = "__items__"


def to_json(value: Any) -> Any:
    """Returns `value` with each dict that JSON would change as a list of its items; tuples become lists."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _ITEMS for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {_ITEMS: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """Returns what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ITEMS}:
        return {from_json(key): from_json(item) for key, item in value[_ITEMS]}
    return {key: from_json(item) for key, item in value.items()}
