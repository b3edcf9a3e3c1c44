"""A tree holds what git would commit, or what is there, and never what is no file of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.sync.tree_files import list_files


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def fill(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


def listed(folder: Path) -> list[str]:
    return list(list_files(str(folder)).paths)


def test_git_decides_what_belongs_to_a_repository(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "new.py", "data/big.bin", "out.log", "gone.py", "pkg/model.py")
    (tmp_path / ".gitignore").write_text("*.log\ndata/\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "train.py", "gone.py", "pkg")
    (tmp_path / "gone.py").unlink()
    assert listed(tmp_path) == [".gitignore", "new.py", "pkg/model.py", "train.py"]
    assert listed(tmp_path / "pkg") == ["model.py"]


def test_submodules_and_repositories_within_are_part_of_it(tmp_path: Path) -> None:
    library = fill(tmp_path / "library", "lib.py")
    git(library, "init")
    git(library, "add", ".")
    git(library, "commit", "-m", "x")
    main = fill(tmp_path / "main", "train.py", "side/own.py", "side/own.log")
    git(main, "init")
    git(main, "submodule", "add", str(library), "sub")
    (main / "side" / ".gitignore").write_text("*.log\n")
    git(main / "side", "init")
    assert listed(main) == [".gitmodules", "side/.gitignore", "side/own.py", "sub/lib.py", "train.py"]


def test_without_git_all_counts_but_what_tools_leave(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", ".env", "a/b/c.py", "a/__pycache__/c.pyc", ".venv/x", "env/pyvenv.cfg", "env/bin/x")
    fill(tmp_path, "node_modules/x.js", ".mypy_cache/x", "pycache.py")
    assert listed(tmp_path) == [".env", "a/b/c.py", "pycache.py", "train.py"]


def test_what_tools_leave_is_left_out_of_a_repository_too(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "a/__pycache__/c.pyc", "env/pyvenv.cfg", "env/bin/x")
    git(tmp_path, "init")
    assert listed(tmp_path) == ["train.py"]


def test_a_folder_that_a_repository_around_ignores_is_taken_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path, ".gitignore", "work/train.py")
    (tmp_path / ".gitignore").write_text("*\n")
    git(tmp_path, "init")
    assert listed(tmp_path / "work") == ["train.py"]


def test_links_are_not_gone_through_and_what_is_no_file_is_said(tmp_path: Path) -> None:
    fill(tmp_path, "outside/secret", "work/train.py")
    work = tmp_path / "work"
    (work / "folder").symlink_to(tmp_path / "outside")
    (work / "broken").symlink_to("nowhere")
    os.mkfifo(work / "pipe")
    found = list_files(str(work))
    assert found.paths == ("broken", "folder", "train.py")
    assert found.notes == ("left out, being no file: `pipe`",)
    git(work, "init")
    assert list_files(str(work)).paths == ("broken", "folder", "train.py")


def test_what_git_knows_in_a_folder_that_is_a_link_now_is_elsewhere(tmp_path: Path) -> None:
    work = fill(tmp_path / "work", "train.py", "data/deep/x")
    git(work, "init")
    git(work, "add", ".")
    (work / "data").rename(tmp_path / "data")
    (work / "data").symlink_to(tmp_path / "data")
    assert listed(work) == ["data", "train.py"]


@pytest.mark.parametrize("in_git", [False, True])
def test_names_may_be_any_bytes(tmp_path: Path, in_git: bool) -> None:
    names = [b"with blank", b"new\nline", b"\xff\xfe", "ö".encode(), b"-z", b"#x", b'"q"', b"a\\b"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(name)
    if in_git:
        git(tmp_path, "init")
    assert sorted(map(os.fsencode, list_files(str(tmp_path)).paths)) == sorted(names)


def test_a_repository_of_somebody_else_is_refused_with_the_way_out(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    fill(tmp_path, "train.py")
    git(tmp_path, "init")
    for path in (tmp_path, tmp_path / ".git"):
        os.chown(path, 54321, -1)
    with pytest.raises(UsageError, match="dubious ownership") as caught:
        list_files(str(tmp_path))
    assert f"safe.directory {tmp_path}" in str(caught.value.hint)


def test_a_variable_of_git_does_not_lead_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "other", "other.py")
    git(tmp_path / "other", "init")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert listed(fill(tmp_path / "work", "train.py")) == ["train.py"]


def test_a_repository_without_git_is_taken_as_it_is_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "train.py", "out.log")
    git(tmp_path, "init")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    found = list_files(str(tmp_path))
    assert found.paths == ("out.log", "train.py")
    assert "git is not installed" in found.notes[0]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such folder"):
        list_files(str(tmp_path / "none"))
