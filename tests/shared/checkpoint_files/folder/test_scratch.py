"""Scratch folders go when their maker does, and those of killed makers with the next one."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.listing import list_tags
from dsrun.checkpoint_files.folder.scratch import scratch_folder


def test_it_is_hidden_and_goes_whatever_happens_in_it(tmp_path: Path) -> None:
    def work() -> None:
        with scratch_folder(tmp_path, "x") as folder:
            (folder / "run").mkdir()
            (folder / "run" / "index.json").write_text("{}")
            assert folder.name.startswith(".dsrun-x-")
            assert list_tags(tmp_path) == []
            raise KeyError(folder.name)

    with pytest.raises(KeyError, match="dsrun-x-"):
        work()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_goes_and_what_others_work_in_stays(tmp_path: Path) -> None:
    for name in (".dsrun-x-dead", ".dsrun-x-live", ".dsrun-x-begun", ".dsrun-y-dead", "kept"):
        (tmp_path / name).mkdir()
        if not name.endswith(("begun", "kept")):
            (tmp_path / name / "lock").touch()
    with (tmp_path / ".dsrun-x-live" / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with scratch_folder(tmp_path, "x") as first, scratch_folder(tmp_path, "x") as second:
            assert {path.name for path in tmp_path.iterdir()} == {
                *(".dsrun-x-live", ".dsrun-x-begun", ".dsrun-y-dead", "kept"),
                *(first.name, second.name),
            }
