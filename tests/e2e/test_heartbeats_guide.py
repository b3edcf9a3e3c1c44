"""docs/guides/heartbeats.md: its script hangs, and is told as the guide shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.cli import clean_environment, run_dsrun

pytestmark = pytest.mark.timeout(120)
GUIDE = (Path(__file__).parents[2] / "docs/guides/heartbeats.md").read_text()


def blocks(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, re.S)
    assert found is not None
    return found[1]


def told(lines: str) -> list[str]:
    """What is told of the rank that hangs; without times, and without Python's own line numbers."""
    kept = [line for line in lines.splitlines() if line.startswith(("error: ", "  rank 1 "))]
    return [re.sub(r"[\d.]+s\b|threading.py:\d+", "#", line) for line in kept]


def test_the_guides_hang_is_told_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python"))
    command, _, shown = blocks("console").partition("\n")
    env = clean_environment(XDG_STATE_HOME=str(tmp_path / "state"), CUDA_VISIBLE_DEVICES="")
    ended = run_dsrun(*command.removeprefix("$ dsrun ").split(), cwd=tmp_path, env=env, timeout_s=90)
    assert ended.exit_code == 76
    assert len(told(shown)) == 2
    assert told(ended.stderr) == told(shown)
