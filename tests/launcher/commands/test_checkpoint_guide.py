"""What docs/guides/checkpoint-verbs.md shows is what the commands print, one after the other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dsrun.checkpoint_files.index.value import INDEX_FILE
from support.checkpoints import write_two_files
from support.cli import invoke

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guides/checkpoint-verbs.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", GUIDE, re.S)
EXAMPLES = re.findall(r"\$ dsrun ([^\n]+)\n((?:(?!\$)[^\n]*\n)*)", "".join(BLOCKS))


def test_the_guide_has_an_example_of_each_verb() -> None:
    verbs = [words.split()[1] for words, _ in EXAMPLES]
    assert verbs == ["ls", "verify", "diff", "export", "export", "import", "rm"]


def test_the_examples_print_what_the_guide_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (100, 200):
        target = tmp_path / "checkpoints" / f"global_step{step}"
        index = write_two_files(target)
        index.values["counters"]["global_steps"] = step
        (target / INDEX_FILE).write_bytes(index.to_bytes())
    (tmp_path / "checkpoints" / "latest").write_text("global_step200")
    shutil.copytree(ROOT / "tests/fixtures/deepspeed_checkpoints/stage2", tmp_path / "deepspeed-run")
    monkeypatch.chdir(tmp_path)
    for words, output in EXAMPLES:
        result = invoke(*words.split())
        assert result.exit_code == (1 if "diff" in words else 0), result.stderr
        assert _without_moments(result.stdout) == _without_moments(output), words


def _without_moments(text: str) -> str:
    """Leaves ages out, and the sizes of what other libraries write."""
    return re.sub(r"\d+s  |[\d.]+ KiB$", "", text, flags=re.M)
