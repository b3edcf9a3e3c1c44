"""A record knows what syncs have left, whichever way they ended; it is of one host and folder, and never guessed."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.sync.record import SyncRecord
from dsrun.launcher.sync.tree_digest import Entry

OLD, NEW, OTHER = (Entry(0o644, digest * 40, 1) for digest in "abc")


def record(tmp_path: Path, target: str = "work") -> SyncRecord:
    return SyncRecord(str(tmp_path / target), {"XDG_STATE_HOME": str(tmp_path / "state")})


def test_until_a_sync_has_ended_the_old_and_the_new_file_are_its_own(tmp_path: Path) -> None:
    first = record(tmp_path)
    first.settle({"a": OLD})
    first.expect({"a": NEW})
    first.write()
    read = record(tmp_path)
    assert [read.is_as_left("a", entry) for entry in (OLD, NEW, OTHER)] == [True, True, False]
    read.settle({"a": NEW})
    read.write()
    assert [record(tmp_path).is_as_left("a", entry) for entry in (OLD, NEW, OTHER)] == [False, True, False]


def test_what_is_forgotten_is_nobodys(tmp_path: Path) -> None:
    first = record(tmp_path)
    first.settle({"a": OLD, os.fsdecode(b"odd \xff\n"): NEW})
    first.forget(["a", "never known"])
    first.write()
    assert record(tmp_path).paths == (os.fsdecode(b"odd \xff\n"),)


def test_folders_have_records_of_their_own_and_links_to_one_share_it(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("work")
    first = record(tmp_path)
    first.settle({"a": OLD})
    first.write()
    assert record(tmp_path, "link").paths == ("a",)
    assert record(tmp_path, "other").paths == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 1}', "\xff"])
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    first = record(tmp_path)
    first.write()
    (path,) = (tmp_path / "state" / "dsrun" / "synced").glob("*.json")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LaunchError, match="is no record of syncs") as caught:
        record(tmp_path)
    assert str(path) in str(caught.value)


def test_the_same_process_may_lock_again(tmp_path: Path) -> None:
    with ExitStack() as keep:
        record(tmp_path).lock(keep)
        record(tmp_path).lock(keep)


def test_a_home_that_is_not_there_is_told_with_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with ExitStack() as keep, pytest.raises(LaunchError, match="cannot keep note of what syncs put there") as caught:
        record(tmp_path).lock(keep)
    assert f"{tmp_path}/state/dsrun/synced" in str(caught.value)
    assert "XDG_STATE_HOME" in str(caught.value.hint)
