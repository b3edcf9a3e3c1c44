"""The fault matrix's oracle itself: it must see what a job leaves, or its rows would prove nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.faults import READY, WAIT, launched


@pytest.mark.parametrize("place", ["/dev/shm/fault-matrix", "$TMPDIR/left", "./core"])
def test_a_file_that_a_job_leaves_is_seen(tmp_path: Path, place: str) -> None:
    name = f"{place}{os.getpid()}"
    held = launched(tmp_path, None, "--no-python", "sh", "-c", f'echo x > "{name}"; echo "{name}"')
    with pytest.raises(AssertionError, match=f"left: .*{os.path.basename(name)}"), held as job:
        path = (tmp_path / "work" / job.wait_for(r"\[0\] (.*)", "stdout")[1]).resolve(strict=True)
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
