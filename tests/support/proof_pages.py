"""Pages of docs/internals that say which tests prove what: tests that a page names, against those that are written."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def named_tests(page: str) -> set[str]:
    """Returns the names of tests that a page has in backquotes."""
    return set(re.findall(r"`(test_\w+)`", page))


def written_tests() -> set[str]:
    """Returns the names of all tests of this tree."""
    return {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
