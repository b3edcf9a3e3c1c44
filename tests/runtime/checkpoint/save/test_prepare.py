"""C14: a folder that one rank does not see, or cannot write to, is found on all of them before the first byte."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch

from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.save.prepare import Readiness
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld


def errors_of(work: Callable[[Readiness, int], None]) -> list[str]:
    """What each of two ranks raises."""

    def body(collectives: LoopbackCollectives) -> str:
        try:
            work(Readiness(collectives, device=torch.device("cpu")), collectives.rank)
        except CheckpointError as error:
            return error.render()
        return ""

    return LoopbackWorld(2).run(body)


class ReadOnly(FileCalls):
    """A file system of which one rank sees a read-only mount."""

    def make_one_folder(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_C14_a_folder_of_the_same_name_on_another_disk_is_found_with_its_host(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    first, second = errors_of(lambda readiness, rank: readiness.check_shared(folders[rank]))
    assert "rank 1 could not see what rank 0 writes" in first
    assert f"on {socket.gethostname()} is not the folder that rank 0 writes to" in second
    assert "hint: save to a folder that all hosts share" in second
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    shared: list[str] = errors_of(lambda readiness, rank: readiness.check_shared(folders[0]))
    assert shared == ["", ""]


def test_C14_a_rank_that_cannot_write_there_is_named_and_what_others_made_goes(tmp_path: Path) -> None:
    def work(readiness: Readiness, rank: int) -> None:
        # Each sees a disk of its own here, so that the other one's folder does not hide the failure.
        readiness.make_folder(tmp_path / str(rank) / "t", 100, calls=ReadOnly() if rank == 1 else FileCalls())

    (tmp_path / "0").mkdir()
    first, second = errors_of(work)
    assert "rank 1 could not make its folder, nothing was published: " in first
    assert "Read-only file system" in first
    assert "Read-only file system" in second
    assert not (tmp_path / "0" / "t").exists()
