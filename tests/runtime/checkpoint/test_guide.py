"""The example of docs/guides/checkpoints.md runs, keeps what it says, and goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsrun.checkpoint_files.storage.tags import complete_tags

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "checkpoints.md"


def test_the_example_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(GUIDE), "exec"), {})
    assert sorted(complete_tags(tmp_path / "checkpoints")) == [f"global_step{n}" for n in (10, 20, 25, 30)]
    longer = example.replace("< 30", "< 35")
    exec(compile(longer, str(GUIDE), "exec"), {})
    assert "global_step35" in complete_tags(tmp_path / "checkpoints")
