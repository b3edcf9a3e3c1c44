"""A checkpoint that goes is gone, and one that somebody reads, writes or has just published stays whole."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.publish import file_name, publish
from dsrun.checkpoint_files.folder.removal import held, remove_tag
from dsrun.checkpoint_files.folder.remove import remove
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.calls import FileCalls, FreeingBeside, try_lock
from dsrun.errors import CheckpointError
from support.publications import publication


def locked(path: Path) -> int:
    """A descriptor that has the lock of a file."""
    descriptor = os.open(path, os.O_RDWR)
    assert try_lock(descriptor)
    return descriptor


def is_whole(target: Path) -> bool:
    return not list(verify(target, read_index(target)))


def test_what_was_just_published_stays_until_its_ranks_know_it(tmp_path: Path) -> None:
    publish(publication(tmp_path, "global_step5", "0a0a0a0a"), calls=FileCalls())
    target = tmp_path / "global_step5"
    writing = locked(target / file_name(1, "0a0a0a0a"))
    publish(publication(tmp_path, "global_step9", "0b0b0b0b", keep_last=1), calls=FileCalls())
    assert is_whole(target), "another job is at the end of its save"
    os.close(writing)
    publish(publication(tmp_path, "global_step10", "0c0c0c0c", keep_last=1), calls=FileCalls())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step10", "latest"]


class Meanwhile(FileCalls):
    """Publishes the tag anew right before its index is taken away, and has a rank hold its file."""

    def __init__(self, folder: Path, *, and_again: bool) -> None:
        self._folder = folder
        self._left = ["0b0b0b0b", "0c0c0c0c"] if and_again else ["0b0b0b0b"]
        self.writing: list[int] = []

    def rename(self, old: Path, new: Path) -> None:
        self._publish("0b0b0b0b")
        super().rename(old, new)
        self._publish("0c0c0c0c")

    def _publish(self, identity: str) -> None:
        if identity in self._left:
            self._left.remove(identity)
            made = publication(self._folder, "t", identity)
            self.writing.append(locked(self._folder / "t" / file_name(0, identity)))
            publish(made, calls=FileCalls())


@pytest.mark.parametrize("and_again", [False, True])
def test_what_is_published_while_the_one_before_goes_stays(tmp_path: Path, and_again: bool) -> None:
    publish(publication(tmp_path, "t", "0a0a0a0a"), calls=FileCalls())
    calls = Meanwhile(tmp_path, and_again=and_again)
    assert remove_tag(tmp_path / "t", calls=calls) == "a save has just published it"
    identity = "0c0c0c0c" if and_again else "0b0b0b0b"
    assert set(read_index(tmp_path / "t").files) == {file_name(rank, identity) for rank in range(2)}
    assert is_whole(tmp_path / "t")
    assert not list((tmp_path / "t").glob(".*"))
    for descriptor in calls.writing:
        os.close(descriptor)
    assert remove_tag(tmp_path / "t", calls=FileCalls()) is None
    assert not (tmp_path / "t").exists()


def test_what_somebody_reads_stays_and_is_named_to_who_removes_it(tmp_path: Path) -> None:
    publish(publication(tmp_path, "global_step5", "0a0a0a0a"), calls=FileCalls())
    with held(tmp_path / "global_step5"), held(tmp_path / "global_step5"):
        publish(publication(tmp_path, "global_step9", "0b0b0b0b", keep_last=1), calls=FileCalls())
        with pytest.raises(CheckpointError, match="global_step5: it stays: a process is reading it") as caught:
            remove(tmp_path, {"global_step5"}, calls=FileCalls())
        assert caught.value.hint == "remove it again when that has ended"
        assert is_whole(tmp_path / "global_step5")
    remove(tmp_path, {"global_step5"}, calls=FileCalls())
    assert not (tmp_path / "global_step5").exists()
    with held(tmp_path / "gone"):
        pass


def test_what_another_job_removes_too_is_gone(tmp_path: Path) -> None:
    publish(publication(tmp_path, "t", "0a0a0a0a"), calls=FileCalls())

    class Other(FileCalls):
        def rename(self, old: Path, new: Path) -> None:
            (tmp_path / "t" / INDEX_FILE).unlink()
            super().rename(old, new)

    assert remove_tag(tmp_path / "t", calls=Other()) is None
    assert remove_tag(tmp_path / "t", calls=FileCalls()) is None
    assert remove_tag(tmp_path / "t", calls=FileCalls()) is None
    assert not (tmp_path / "t").exists()


def test_blocks_of_removed_files_are_freed_beside_and_can_be_waited_for(tmp_path: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT
    named, removed = os.open(tmp_path / "named", flags), os.open(tmp_path / "removed", flags)
    calls = FreeingBeside()
    calls.remove(tmp_path / "removed")
    calls.close(named)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(named)
    calls.close(removed)
    calls.wait_until_freed()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(removed)


def test_a_removed_file_is_closed_where_no_thread_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with few processes; the checkpoint that replaced it has been published."""
    removed = os.open(tmp_path / "removed", os.O_RDWR | os.O_CREAT)
    calls = FreeingBeside()
    calls.remove(tmp_path / "removed")

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    calls.close(removed)
    calls.wait_until_freed()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(removed)


def test_a_file_that_another_machine_has_removed_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS no question about it is answered any more."""
    removed = os.open(tmp_path / "removed", os.O_RDWR | os.O_CREAT)

    def fail(descriptor: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        FreeingBeside().close(removed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(removed)
