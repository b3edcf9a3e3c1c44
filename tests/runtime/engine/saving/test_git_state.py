"""The commit of the folder a script runs in, and whether it was changed; None where nobody can tell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsrun.runtime.engine.saving.git_state import git_state


def git(*words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_it_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    git_state.cache_clear()
    assert git_state() is None
    git("init", "-q")
    Path("train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    for content, changed in (("1", False), ("2", True)):
        Path("train.py").write_text(content)
        Path("untracked").write_text("")
        git_state.cache_clear()
        assert git_state() == {"commit": git("rev-parse", "HEAD"), "changed": changed}
    git_state.cache_clear()


def test_no_git_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    git_state.cache_clear()
    assert git_state() is None
    git_state.cache_clear()
