"""docs/internals/cuda.md names tests that exist, says where each runs, and has every finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.proof_pages import named_tests, written_tests

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals" / "cuda.md").read_text(encoding="utf-8")

#: Findings of the reading, by their numbers: certain, likely and possible ones.
FINDINGS = {
    *(f"1.{number}" for number in range(1, 7)),
    *(f"2.{number}" for number in range(1, 12)),
    *("3.1", "4.1", "4.2", "4.3", "5.1", "5.2", "5.3"),
    *(f"6.{number}" for number in range(1, 12)),
}


def test_every_test_and_file_that_the_page_names_exists() -> None:
    named = named_tests(PAGE)
    assert len(named) > 80
    assert named - written_tests() == set()
    files = set(re.findall(r"`(tests/[\w/.]+)`", PAGE))
    assert files
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_every_finding_has_a_row() -> None:
    rows = re.findall(r"^\| ([\d., ]+) \S", PAGE, re.MULTILINE)
    assert {number for row in rows for number in row.replace(",", " ").split()} == FINDINGS


def test_what_is_said_to_run_on_a_gpu_is_marked_so(request: pytest.FixtureRequest) -> None:
    """Looks at the tests that this run has collected: in a whole run, at all of them."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"^\| [\d.]+", line)]
    assert {len(row) for row in rows} == {4}
    named = {name for row in rows for name in named_tests(row[3])}
    assert len(named) > 30
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    collected = {item.originalname for item in items}
    marked = {item.originalname for item in items if item.get_closest_marker("cuda") is not None}
    assert (named & collected) - marked == set()
