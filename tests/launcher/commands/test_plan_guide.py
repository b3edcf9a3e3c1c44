"""What the guides and their internals show of `dsrun plan` is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.cli import invoke

ROOT = Path(__file__).parents[3]
PAGES = ("guides/plan", "internals/offload")
EXAMPLES = [
    example
    for page in PAGES
    for example in re.findall(
        r"```console\n\$ dsrun (?P<words>plan [^\n]+)\n(?P<output>.*?)```",
        (ROOT / f"docs/{page}.md").read_text(),
        re.S,
    )
]


def test_the_guides_have_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(("words", "output"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_an_example_prints_what_the_guide_shows(words: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout) == (0, output)
