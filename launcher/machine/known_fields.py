"""Values of this dsrun out of the JSON form that another dsrun wrote, which may know more or fewer fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any


def known_fields(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments for a dataclass: what is unknown is left out, and what is missing is the default, else None.

    Args:
        kind: dataclass to be made.
        value: its JSON form, as another host sent it.
    """
    return {
        field.name: value.get(field.name)
        for field in fields(kind)
        if field.name in value or (field.default is MISSING and field.default_factory is MISSING)
    }
