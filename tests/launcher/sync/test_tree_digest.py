"""Equal trees are equal values, whatever differs makes another, and what is too large is named."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.sync.tree_digest import LINK, Entry, read_entry, read_tree

#: Reads a tree as somebody to whom permissions matter.
UNPRIVILEGED = """
import os, sys
from dsrun.errors import UsageError
from dsrun.launcher.sync.tree_digest import read_tree
if os.geteuid() == 0:
    os.setresuid(54321, 54321, 54321)
try:
    read_tree(sys.argv[1])
except UsageError as error:
    print(error.render())
"""


def make(folder: Path) -> Path:
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "pkg" / "a.py").write_text("")
    (folder / "run.sh").write_text("true")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("train.py")
    return folder


def entries(folder: Path) -> dict[str, Entry]:
    return read_tree(str(folder)).entries


def test_equal_trees_are_equal_values(tmp_path: Path) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other")
    os.utime(other / "train.py", (1, 1))
    assert entries(one) == entries(other)
    assert list(entries(one)) == ["link", "pkg/a.py", "run.sh", "train.py"]
    assert read_tree(str(one)).size == 8 + 0 + 4 + 8


def test_any_difference_makes_another_value(tmp_path: Path) -> None:
    changes: dict[str, Callable[[Path], object]] = {
        "content": lambda folder: (folder / "train.py").write_text("print(2)"),
        "name": lambda folder: (folder / "train.py").rename(folder / "train2.py"),
        "more": lambda folder: (folder / "new").touch(),
        "less": lambda folder: (folder / "pkg" / "a.py").unlink(),
        "mode": lambda folder: (folder / "run.sh").chmod(0o644),
        "file for link": lambda folder: ((folder / "link").unlink(), (folder / "link").write_text("train.py")),
    }
    one = entries(make(tmp_path / "one"))
    for name, change in changes.items():
        change(make(tmp_path / name))
        assert entries(tmp_path / name) != one, name


def test_an_entry_tells_files_from_links_and_from_all_else(tmp_path: Path) -> None:
    make(tmp_path / "one")
    link = read_entry(str(tmp_path / "one" / "link"))
    assert link is not None
    assert (link.mode, link.size) == (LINK, len("train.py"))
    empty = read_entry(str(tmp_path / "one" / "pkg" / "a.py"))
    assert empty == Entry(0o644, "3345524abf6bbe1809449224b5972c41790b6cf2", 0)
    os.mkfifo(tmp_path / "pipe")
    assert [read_entry(str(tmp_path / name)) for name in ("pipe", "one", "none", "one/run.sh/x")] == [None] * 4


def test_links_that_lead_out_are_said(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    (folder / "abs").symlink_to("/data")
    (folder / "pkg" / "up").symlink_to("../../data")
    (folder / "pkg" / "in").symlink_to("../train.py")
    assert read_tree(str(folder)).notes == (
        f"symbolic links out of {folder} are copied as they are: abs -> /data, pkg/up -> ../../data",
    )


def test_too_many_files_are_named_by_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    for index in range(5):
        (folder / "pkg" / f"{index}").touch()
    with pytest.raises(UsageError, match=r"holds 9 files, more than 8; most are in pkg \(6\)") as caught:
        read_tree(str(folder), max_files=8)
    assert ".gitignore" in str(caught.value.hint)
    for index in range(9):
        (folder / f"{index}.png").touch()
    with pytest.raises(UsageError, match=r"most are in the folder itself \(12\), pkg \(6\)"):
        read_tree(str(folder), max_files=8)


def test_too_many_bytes_are_named_by_file_before_any_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    with (folder / "model.pt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"holds 1.0 TiB, more than 500.0 MiB; the largest are model.pt \(1.0 TiB\)"):
        read_tree(str(folder))


def test_every_file_that_cannot_be_read_is_named() -> None:
    # A folder that an unprivileged user can reach.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = make(Path(place) / "one")
        for name in ("train.py", "run.sh"):
            (folder / name).chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, str(folder)], capture_output=True, text=True, timeout=60
        )
    assert done.stdout.count("cannot read it: Permission denied") == 2, done.stderr
    assert "train.py" in done.stdout
    assert "run.sh" in done.stdout
