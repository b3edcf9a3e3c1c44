"""Marks that say why they are there."""

from __future__ import annotations

import pytest


def reason_of(item: pytest.Item, marker: str, *, example: str) -> str | None:
    """Returns the reason that a test's marker gives; None for a test without it.

    Args:
        item: test.
        marker: name of the marker.
        example: reason that an error shows.

    Raises:
        pytest.UsageError: a marker without a reason, or with more than that.
    """
    found = item.get_closest_marker(marker)
    if found is None:
        return None
    if len(found.args) != 1:
        raise pytest.UsageError(f"{item.nodeid}: `{marker}` wants one reason, like {marker}({example!r})")
    return str(found.args[0])
