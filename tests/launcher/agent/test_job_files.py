"""A host knows the front end's folder by its mark, and makes a folder of its own where it does not find it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from dsrun.launcher.agent.job_files import find_or_make, marked, remove_left


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_who_finds_the_mark_shares_the_folder_and_does_not_remove_it(tmp_path: Path) -> None:
    with marked(str(tmp_path)) as mark:
        folder = find_or_make(str(tmp_path), mark, "j1")
    assert (folder.path, folder.is_own) == (str(tmp_path), False)
    folder.remove()
    assert tmp_path.is_dir()


@pytest.mark.parametrize("mark", ["", ".shared-of-another-machine"])
def test_a_folder_of_the_same_path_without_the_mark_is_another(tmp_path: Path, temporary: Path, mark: str) -> None:
    with marked(str(tmp_path)):
        folder = find_or_make(str(tmp_path), mark, "j1")
    assert folder.is_own
    assert Path(folder.path).parent == temporary
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_the_mark_is_gone_with_the_attempt_and_another_each_time(tmp_path: Path) -> None:
    with marked(str(tmp_path)) as first:
        assert (tmp_path / first).is_file()
    with marked(str(tmp_path)) as second:
        assert first != second
    assert not (tmp_path / first).exists()


def test_a_folder_that_takes_no_file_has_no_mark(tmp_path: Path) -> None:
    with marked(str(tmp_path / "missing")) as mark:
        assert mark == ""


def test_only_folders_of_the_job_are_removed_and_no_link_is_followed(tmp_path: Path, temporary: Path) -> None:
    own, other = find_or_make("/none", "", "j1"), find_or_make("/none", "", "j10")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = temporary / "dsrun-j1-planted"
    planted.symlink_to(elsewhere)
    assert remove_left("j1") == []
    assert not Path(own.path).exists()
    assert Path(other.path).is_dir()
    assert planted.is_symlink()
    assert elsewhere.is_dir()
