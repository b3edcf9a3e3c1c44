"""State of a schedule as JSON values and back: JSON has no dicts with keys that are no text, and torch's have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsrun.errors import CheckpointError

_ITEMS = "__items__"


def check_json(values: Mapping[str, Any]) -> None:
    """Raises where a value would not come back from JSON as it is.

    Raises:
        CheckpointError: naming the value.
    """
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{name} cannot be saved: {error}", hint="it takes JSON values: numbers, text, lists and dicts"
            ) from error


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
