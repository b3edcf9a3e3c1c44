"""Jobs of one folder know of each other as long as they live, and leave each other's checkpoints alone."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.jobs import JobMarks, other_jobs, own_name
from dsrun.checkpoint_files.folder.publish import publish
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.tags import complete_tags
from dsrun.contract.environment import JOB_ID_ENV
from dsrun.errors import CheckpointError
from support.odd_files import put_in_place
from support.publications import publication

#: Claims what it is told to, a tag a line, and says what it was told in return.
OTHER = """
import sys
from pathlib import Path
from dsrun.checkpoint_files.folder.jobs import JobMarks
marks = JobMarks()
for line in sys.stdin:
    print(len(marks.claim(Path(sys.argv[1]), line.strip(), "0f0f0f0f")), flush=True)
"""


@contextmanager
def another_job(folder: Path, name: str) -> Generator[subprocess.Popen[str]]:
    """A process of another job, which lives until the end of the block or until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, JOB_ID_ENV: name},
    ) as job:  # fmt: skip
        try:
            yield job
        finally:
            job.kill()


def claim(job: subprocess.Popen[str], tag: str) -> int:
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdin.write(f"{tag}\n")
    job.stdin.flush()
    return int(job.stdout.readline())


def test_jobs_leave_each_others_checkpoints_alone_as_long_as_they_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_ID_ENV, "mine")
    mine = JobMarks()
    with another_job(tmp_path, "theirs") as job:
        assert claim(job, "global_step1") == 0
        publish(publication(tmp_path, "global_step1", "0a0a0a0a", job="theirs"), calls=FileCalls())
        (said,) = mine.claim(tmp_path, "global_step2", "0b0b0b0b")
        assert f"{tmp_path}: job theirs (process {job.pid} of " in said
        assert ", mine: " in said
        assert mine.claim(tmp_path, "global_step3", "0c0c0c0c") == [], "it was said"
        assert claim(job, "global_step4") == 1, "the other one is told too"
        for tag in ("global_step2", "global_step3"):
            publish(publication(tmp_path, tag, "0d0d0d0d", job="mine", keep_last=1), calls=FileCalls())
        assert complete_tags(tmp_path) == ["global_step1", "global_step3"]
        with pytest.raises(CheckpointError, match=r"global_step4: job theirs \(process .* saves it too.*this is mine"):
            mine.claim(tmp_path, "global_step4", "0e0e0e0e")
        job.kill()
        job.wait()
    assert mine.claim(tmp_path, "global_step4", "0e0e0e0e") == []
    publish(publication(tmp_path, "global_step4", "0e0e0e0e", job="mine", keep_last=1), calls=FileCalls())
    assert complete_tags(tmp_path) == ["global_step4"]
    mine.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step4", "latest"]


def test_a_job_does_not_meet_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_ID_ENV, raising=False)
    first, second = JobMarks(), JobMarks()
    assert first.claim(tmp_path, "t", "0a0a0a0a") == second.claim(tmp_path, "t", "0b0b0b0b") == []
    assert other_jobs(tmp_path, own_name()) == []
    assert [job.tags for job in other_jobs(tmp_path, "another")] == [frozenset({"t"})] * 2
    assert str(other_jobs(tmp_path, "another")[0]) == own_name()
    first.release()
    first.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_a_job_has_forked_does_not_stand_for_it(tmp_path: Path) -> None:
    forks = f"""
import os, sys, time
from pathlib import Path
from dsrun.checkpoint_files.folder.jobs import JobMarks
marks = JobMarks()
marks.claim(Path({str(tmp_path)!r}), "t", "0f0f0f0f")
if os.fork():
    os.kill(os.getpid(), 9)
print(flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", forks], stdout=subprocess.PIPE, start_new_session=True) as job:
        try:
            job.wait()
            assert job.stdout is not None
            assert job.stdout.readline(), "the child lives"
            assert list(tmp_path.glob(".job-*")), "its parent was killed"
            assert other_jobs(tmp_path, None) == []
            assert list(tmp_path.iterdir()) == [], "and the mark is gone"
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def test_a_mark_stays_where_locks_cannot_be_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with another_job(tmp_path, "theirs") as job:
        assert claim(job, "t") == 0
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", refuse)
            assert other_jobs(tmp_path, None) == []
        assert [found.name for found in other_jobs(tmp_path, None)] == ["theirs"]


def test_what_is_no_mark_is_no_job(tmp_path: Path) -> None:
    put_in_place(tmp_path / ".job-0a0a0a0a", "FIFO")
    put_in_place(tmp_path / ".job-0b0b0b0b", "folder")
    (tmp_path / ".job-0c0c0c0c").write_text("of one that was killed")
    assert other_jobs(tmp_path, None) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".job-0a0a0a0a", ".job-0b0b0b0b"]
