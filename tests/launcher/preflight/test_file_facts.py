"""Files are told as they are on a host; Python files not at all where looking through them would take too long."""

from __future__ import annotations

import os
from pathlib import Path

from dsrun.launcher.preflight.file_facts import code_digests, file_facts


def test_python_files_are_told_and_nothing_that_tools_made(tmp_path: Path) -> None:
    for path in ("train.py", "pkg/net.py", "pkg/data.txt", "__pycache__/x.py", ".git/hook.py", "env/lib/y.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "train.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = code_digests(str(tmp_path))
    assert found is not None
    assert sorted(found) == ["pkg/net.py", "train.py"]
    before = found["train.py"]
    (tmp_path / "train.py").write_text("changed")
    after = code_digests(str(tmp_path))
    assert after is not None
    assert after["train.py"] != before
    assert after["pkg/net.py"] == found["pkg/net.py"]


def test_a_folder_that_is_too_large_is_not_compared(tmp_path: Path) -> None:
    for number in range(1001):
        (tmp_path / f"{number}.py").touch()
    assert code_digests(str(tmp_path)) is None
    (tmp_path / "0.py").unlink()
    assert len(code_digests(str(tmp_path)) or {}) == 1000


def test_a_folder_that_takes_too_long_is_not_compared(tmp_path: Path) -> None:
    assert code_digests(str(tmp_path), patience_s=-1) is None


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert code_digests(str(tmp_path / "gone")) == {}


def test_contents_differ_in_their_digest_alone(tmp_path: Path) -> None:
    one, other, same = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    one.write_text("lr = 1")
    other.write_text("lr = 2")
    same.write_text("lr = 1")
    found = [file_facts(str(path)).digest for path in (one, same, other)]
    assert found[0] == found[1] != found[2]


def test_a_folder_stands_for_the_file_that_python_runs_in_it(tmp_path: Path) -> None:
    assert file_facts(str(tmp_path)).fault == f"{tmp_path}/__main__.py: no such file or directory"
    (tmp_path / "__main__.py").write_text("print()")
    assert file_facts(str(tmp_path)).digest == file_facts(str(tmp_path / "__main__.py")).digest


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert file_facts(str(tmp_path / "pipe")).fault is None
