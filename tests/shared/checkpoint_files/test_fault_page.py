"""docs/internals/checkpoint-faults.md names tests that exist, and has every row of the matrix."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "internals" / "checkpoint-faults.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 35
    assert named - written == set()


def test_the_page_has_every_row() -> None:
    rows = re.findall(r"^\| (C\d+) \|.*\| .*test_|^\| (C2) \|", PAGE, re.MULTILINE)
    assert [first or second for first, second in rows] == [f"C{number}" for number in range(1, 23)]
