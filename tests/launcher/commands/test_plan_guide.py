"""What docs/guides/plan.md shows is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.cli import invoke

ROOT = Path(__file__).parents[3]
EXAMPLES = re.findall(
    r"```console\n\$ dsrun (?P<words>[^\n]+)\n(?P<output>.*?)```", (ROOT / "docs/guides/plan.md").read_text(), re.S
)


def test_the_guide_has_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(("words", "output"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_an_example_prints_what_the_guide_shows(words: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout) == (0, output)
