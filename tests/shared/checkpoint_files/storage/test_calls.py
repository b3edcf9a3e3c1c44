"""A file that a save makes is its own, also where another job cleans up between its making and its lock."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.removal import remove_unnamed
from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.checkpoint_files.storage.calls import FileCalls, create_locked, is_open_at, replace_file, try_lock
from dsrun.checkpoint_files.storage.places import small_content
from dsrun.checkpoint_files.storage.posix import PosixStorage


class CleanedUp(FileCalls):
    """Has another job do something once, as soon as a file is made and before it is locked."""

    def __init__(self, meanwhile: Callable[[Path], None]) -> None:
        self._meanwhile = [meanwhile]
        self.made = 0

    def create(self, path: Path, *, direct: bool = False) -> int:
        descriptor = super().create(path, direct=direct)
        self.made += 1
        if self._meanwhile:
            self._meanwhile.pop()(path)
        return descriptor


def remove_at_once(path: Path) -> None:
    remove_unnamed(path.parent, calls=FileCalls())
    assert not path.exists()


def remove_while_locked(path: Path) -> None:
    """Another job has the lock when the save wants it, and removes the file then."""
    descriptor = os.open(path, os.O_RDWR)
    assert try_lock(descriptor)

    def remove() -> None:
        path.unlink()
        os.close(descriptor)

    threading.Thread(target=remove).start()


def let_it_stay(path: Path) -> None:
    """Another job has the lock when the save wants it, and removes nothing."""
    descriptor = os.open(path, os.O_RDWR)
    assert try_lock(descriptor)
    threading.Thread(target=os.close, args=(descriptor,)).start()


MEANWHILE = pytest.mark.parametrize(
    ("meanwhile", "made"), [(remove_at_once, 2), (remove_while_locked, 2), (let_it_stay, 1)]
)


@MEANWHILE
def test_an_index_is_written_though_another_job_cleans_up(
    tmp_path: Path, meanwhile: Callable[[Path], None], made: int
) -> None:
    calls = CleanedUp(meanwhile)
    replace_file(calls, tmp_path / INDEX_FILE, b"{}", mark="0f0f0f0f")
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_FILE]
    assert (tmp_path / INDEX_FILE).read_bytes() == b"{}"
    assert calls.made == made


@MEANWHILE
def test_a_ranks_file_is_there_and_locked_though_another_job_cleans_up(
    tmp_path: Path, meanwhile: Callable[[Path], None], made: int
) -> None:
    path, calls = tmp_path / "rank-00000-0f0f0f0f.safetensors", CleanedUp(meanwhile)
    written = PosixStorage(calls).write(path, small_content(b"abc"), over=None)
    assert (written.stored.nbytes, path.read_bytes(), calls.made) == (3, b"abc", made)
    remove_unnamed(tmp_path, calls=FileCalls())
    assert path.exists(), "its lock keeps it until the verdict"
    written.release(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_gives_the_file_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    descriptor = create_locked(tmp_path / "file", FileCalls().create)
    assert is_open_at(tmp_path / "file", descriptor)
    os.close(descriptor)


def test_a_path_is_open_while_it_names_that_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = FileCalls().create(path)
    assert is_open_at(path, descriptor)
    path.unlink()
    assert not is_open_at(path, descriptor)
    os.close(FileCalls().create(path))
    assert not is_open_at(path, descriptor)
    os.close(descriptor)


def test_a_file_that_was_made_anew_is_not_removed_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs clean up; the first has removed a file, and a save made it anew, when the second takes its lock."""
    path = tmp_path / "rank-00000-0f0f0f0f.safetensors"
    path.write_bytes(b"of a killed save")
    lock = fcntl.flock
    anew: list[int] = []

    def exchange(descriptor: int, operation: int) -> None:
        if not anew:
            path.unlink()
            anew.append(FileCalls().create(path))
            lock(anew[0], fcntl.LOCK_EX)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", exchange)
    remove_unnamed(tmp_path, calls=FileCalls())
    assert is_open_at(path, anew[0])
    os.close(anew[0])
    remove_unnamed(tmp_path, calls=FileCalls())
    assert not path.exists()
