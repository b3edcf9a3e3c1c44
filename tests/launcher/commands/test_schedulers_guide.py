"""What docs/guides/schedulers.md and docs/guides/kubernetes.md show is what the commands print."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.cli import invoke

GUIDES = Path(__file__).parents[3] / "docs/guides"
EXAMPLES = [
    example
    for guide in ("schedulers", "kubernetes")
    for example in re.findall(
        r"```console\n\$ dsrun (?P<words>(?:slurm|k8s)[^\n]+)\n(?P<output>.*?)```",
        (GUIDES / f"{guide}.md").read_text(),
        re.S,
    )
]


def test_the_guides_have_an_example_of_each_verb() -> None:
    assert [words.split()[0] for words, _ in EXAMPLES] == ["slurm", "k8s"]


@pytest.mark.parametrize(("words", "output"), EXAMPLES, ids=[words.split()[0] for words, _ in EXAMPLES])
def test_an_example_prints_what_the_guide_shows(
    words: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4}')
    monkeypatch.chdir(tmp_path)
    result = invoke(*words.split())
    shown = result.stdout.replace(str(tmp_path), "/home/ada/work").replace(sys.executable, "/home/ada/venv/bin/python")
    assert (result.exit_code, shown) == (0, output)
