"""docs/config.md and docs/config.schema.json say what the models say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.config.keys import all_keys
from dsrun.config.knob import Status
from dsrun.config.reference import page, schema_text

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("name", "text"), [("config.md", page()), ("config.schema.json", schema_text())])
def test_generated_files_are_up_to_date(name: str, text: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == text, "run `python -m dsrun.config.reference docs`"


def test_every_key_says_what_it_means_and_why_where_it_does_not_work() -> None:
    for key in all_keys():
        assert key.meaning.text.endswith((".", "?")), key.path
        assert key.status is Status.WORKS or key.why, key.path
        assert not key.why.endswith("."), key.path


def test_the_page_has_every_key() -> None:
    text = page()
    assert [key.path for key in all_keys() if key.inner is None and f"| `{key.name}` |" not in text] == []
