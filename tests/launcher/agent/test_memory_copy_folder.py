"""Folders for copies in memory: held while an attempt runs, gone with the job, and with its front end at last."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsrun.launcher.agent.memory_copy_folder import CopyFolderLock, copy_folder_of, remove_abandoned, remove_copies

LATER_S = 3600.0


@pytest.fixture
def job_id() -> Iterator[str]:
    job_id = f"test-{uuid.uuid4().hex[:8]}"
    yield job_id
    remove_copies(job_id)


def folder(job_id: str, node_rank: int = 0) -> Path:
    path = copy_folder_of(job_id, node_rank)
    assert path is not None
    return Path(path)


def test_what_another_attempt_may_want_stays_and_an_empty_folder_never_does(job_id: str) -> None:
    held = CopyFolderLock(str(folder(job_id)))
    assert folder(job_id).stat().st_mode & 0o777 == 0o700
    held.end(remove=False)
    assert not folder(job_id).exists()
    held = CopyFolderLock(str(folder(job_id)))
    (folder(job_id) / "rank-00000.0").write_bytes(b"state")
    held.end(remove=False)
    assert (folder(job_id) / "rank-00000.0").read_bytes() == b"state"
    CopyFolderLock(str(folder(job_id))).end(remove=True)
    assert not folder(job_id).exists()


def test_all_hosts_folders_of_a_job_are_removed_and_no_other_jobs(job_id: str) -> None:
    other = f"{job_id}x"
    for name, node in ((job_id, 0), (job_id, 11), (other, 0)):
        folder(name, node).mkdir()
    assert remove_copies(job_id) == []
    assert [folder(name, node).exists() for name, node in ((job_id, 0), (job_id, 11), (other, 0))] == [
        False,
        False,
        True,
    ]
    assert remove_copies(other) == []


def test_only_what_nobody_holds_and_has_touched_for_long_is_abandoned(job_id: str) -> None:
    held = CopyFolderLock(str(folder(job_id, 0)))
    folder(job_id, 1).mkdir()
    folder(job_id, 2).mkdir()
    now_s = folder(job_id, 2).stat().st_mtime
    for node in (0, 1):
        os.utime(folder(job_id, node), (now_s - LATER_S, now_s - LATER_S))
    assert remove_abandoned(now_s=now_s) == []
    assert [folder(job_id, node).exists() for node in range(3)] == [True, False, True]
    held.end(remove=True)


def test_a_folder_that_is_a_link_is_refused_and_left(job_id: str, tmp_path: Path) -> None:
    folder(job_id).symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"symbolic link|Not a directory"):
        CopyFolderLock(str(folder(job_id)))
    assert remove_copies(job_id) == []
    assert tmp_path.is_dir()
    folder(job_id).unlink()
