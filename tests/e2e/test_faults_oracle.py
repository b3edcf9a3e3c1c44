"""The fault matrix's oracle itself: it must see what a job leaves, or its rows would prove nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.faults import READY, WAIT, Places, launched


@pytest.mark.parametrize("place", ["/dev/shm/fault-matrix", "$TMPDIR/left", "./core"])
def test_a_file_that_a_job_leaves_is_seen(tmp_path: Path, place: str) -> None:
    name = f"{place}{os.getpid()}"
    held = launched(tmp_path, None, "--no-python", "sh", "-c", f'echo x > "{name}"; echo "{name}"')
    with pytest.raises(AssertionError, match=f"left: .*{os.path.basename(name)}"), held as job:
        path = (tmp_path / "work" / job.wait_for(r"\[0\] (.*)", "stdout")[1]).resolve(strict=True)
    path.unlink()


def test_another_programs_file_in_shared_memory_is_none_of_the_jobs(tmp_path: Path) -> None:
    places = Places.below(tmp_path)
    theirs = Path(f"/dev/shm/com.example.{os.getpid()}")
    like_a_job, kept = Path(f"/dev/shm/torch_{os.getpid()}_oracle"), Path(f"/dev/shm/psm_{os.getpid()}_oracle")
    try:
        for path in (theirs, like_a_job, kept):
            path.touch()
        if os.geteuid() == 0:
            os.chown(kept, 65534, 65534)
        left = places.left() & {str(theirs), str(like_a_job), str(kept)}
        assert left == ({str(like_a_job)} if os.geteuid() == 0 else {str(like_a_job), str(kept)})
    finally:
        for path in (theirs, like_a_job, kept):
            path.unlink()


def test_a_job_that_still_runs_is_seen(tmp_path: Path) -> None:
    with launched(tmp_path, READY + WAIT, "-n", "2", "--start", "exec", grace_s=0.1) as job:
        ranks = set(job.wait_ready(2).values())
        parts = {job.process.pid, job.agent(), job.spawner()}
        assert ranks | parts <= job.processes()
        assert len(ranks | parts) == 5
        assert set(job.children(job.spawner() or 0)) == ranks
        job.process.terminate()


def test_a_traceback_of_dsrun_is_seen_and_one_of_a_rank_is_not(tmp_path: Path) -> None:
    with launched(tmp_path, "raise ValueError('x')\n", "--start", "exec") as job:
        assert "[0] Traceback" in job.end().text
    with (
        pytest.raises(AssertionError, match="Traceback"),
        launched(tmp_path, None, "--no-python", "true", prefix=["sh", "-c", "echo 'Traceback (most' >&2", "sh"]) as job,
    ):
        job.end()
