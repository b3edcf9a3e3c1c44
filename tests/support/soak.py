"""Tests that scripts/test leaves out, for a part of each runs there and the rest takes minutes.

A test, or a case of one, marked `soak(reason)` runs with `bash scripts/test --soak` alone. The reason says what stands
for it by default. tests/conftest.py registers what is here; no test imports it.
"""

from __future__ import annotations

import pytest

from .marks import reason_of

MARKER = "soak"
OPTION = "--soak"


def add_option(parser: pytest.Parser) -> None:
    """Adds the option that runs marked tests with all others."""
    parser.addoption(OPTION, action="store_true", help=f"run the tests marked `{MARKER}` too, which take minutes each")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes marked tests out of a run without the option; pytest counts them as deselected.

    Raises:
        pytest.UsageError: a marker without a reason.
    """
    left: list[pytest.Item] = []
    kept: list[pytest.Item] = []
    for item in items:
        reason = reason_of(item, MARKER, example="three of 144 pairs")
        (kept if reason is None or config.getoption(OPTION) else left).append(item)
    if left:
        items[:] = kept
        config.hook.pytest_deselected(items=left)
