"""docs/internals/checkpoint-faults.md names tests that exist, and has every row of the matrix."""

from __future__ import annotations

import re
from pathlib import Path

from support.proof_pages import named_tests, written_tests

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "internals" / "checkpoint-faults.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    named = named_tests(PAGE)
    assert len(named) > 35
    assert named - written_tests() == set()


def test_the_page_has_every_row() -> None:
    rows = re.findall(r"^\| (C\d+) \|.*\| .*test_|^\| (C2) \|", PAGE, re.MULTILINE)
    assert [first or second for first, second in rows] == [f"C{number}" for number in range(1, 23)]
