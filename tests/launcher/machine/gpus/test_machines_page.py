"""docs/internals/gpu-machines.md names tests that exist, each row one at least, and every recorded machine."""

from __future__ import annotations

import re
from pathlib import Path

from support.machines import NAMES, recorded_facts
from support.proof_pages import named_tests, written_tests

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "internals" / "gpu-machines.md").read_text(encoding="utf-8")
GROUPS = [
    "Drivers and devices",
    "Cores and memory",
    "Starting",
    "Schedulers",
    "Network",
    "Time-outs",
    "Causes",
    "Kubernetes",
]


def sections() -> dict[str, list[list[str]]]:
    """Returns the rows of each section's table, cell by cell."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    return {
        title: [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()
            if re.match(r"\| (?!what goes|file )", line)
        ]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_test_that_the_page_names_exists() -> None:
    named = named_tests(PAGE)
    assert len(named) > 120
    assert named - written_tests() == set()


def test_every_row_has_a_name_of_its_own_and_a_test() -> None:
    tables = {title: rows for title, rows in sections().items() if rows and title != "Machines"}
    assert list(tables) == GROUPS
    rows = [row for table in tables.values() for row in table]
    assert {len(row) for row in rows} == {3}
    names = [re.findall(r"^\*\*.+?\*\*", row[0]) for row in rows]
    assert [row[0] for row, name in zip(rows, names, strict=True) if not name or not named_tests(row[2])] == []
    assert len({name[0] for name in names}) == len(rows) > 55


def test_every_recorded_machine_is_named_and_says_what_it_is_from() -> None:
    assert sorted(row[0].strip("`") for row in sections()["Machines"]) == NAMES
    for name in NAMES:
        text = (ROOT / "tests" / "fixtures" / "machines" / f"{name}.yaml").read_text(encoding="utf-8")
        header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
        assert "By hand" in header, name
        assert "says" in recorded_facts(name), name
