from __future__ import annotations

from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.dashboard.followed_jobs import KEPT_S, FollowedJobs
from dsrun.launcher.jobs.listing import JobState, find_job
from support.job_records import leave_job
from support.recorded_runs import append_records, run_lines
from support.watched_jobs import JOB_ID, running_job

OTHER = "20261122-0733-efgh"


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_jobs_that_run_are_found_as_they_start_and_kept_a_while_after_their_end(tmp_path: Path) -> None:
    jobs, clock = tmp_path / "dsrun" / "jobs", Clock()
    followed = FollowedJobs((), {"XDG_STATE_HOME": str(tmp_path)}, lambda job: [], clock=clock)

    def seen() -> list[tuple[str, JobState]]:
        clock.now_s += 10
        followed.look()
        return [(view.job.id, view.job.state) for view in followed.views()]

    assert seen() == []
    leave_job(jobs, "20261120-0733-done", outcome="done")
    with running_job(jobs):
        assert seen() == [(JOB_ID, JobState.RUNNING)]
        with running_job(jobs, job_id=OTHER):
            assert [job for job, _ in seen()] == [JOB_ID, OTHER]
    assert seen() == [(JOB_ID, JobState.CRASHED), (OTHER, JobState.CRASHED)]
    clock.now_s += KEPT_S
    assert seen() == []


def test_jobs_that_were_named_are_kept_however_they_are(tmp_path: Path) -> None:
    jobs, clock = tmp_path / "dsrun" / "jobs", Clock()
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    append_records(leave_job(jobs, JOB_ID, outcome="done"), run_lines(range(1, 6)))
    followed = FollowedJobs([find_job(JOB_ID, environ)], environ, lambda job: [], clock=clock)
    with running_job(jobs, job_id=OTHER):
        for _ in range(3):
            assert followed.look()
            clock.now_s += KEPT_S
        (view,) = followed.views()
    assert view.figures.last is not None


def test_files_that_cannot_be_read_are_told_and_the_other_jobs_as_well(tmp_path: Path) -> None:
    jobs, clock = tmp_path / "dsrun" / "jobs", Clock()
    with running_job(jobs) as folder, running_job(jobs, job_id=OTHER):
        JobPaths(folder).records.mkdir()
        followed = FollowedJobs((), {"XDG_STATE_HOME": str(tmp_path)}, lambda job: [], clock=clock)
        assert followed.look()
        assert followed.problems == {JOB_ID: "its files cannot be read: is a directory"}
        assert [view.job.id for view in followed.views()] == [OTHER]
        JobPaths(folder).records.rmdir()
        followed.look()
        assert followed.problems == {}
        assert [view.job.id for view in followed.views()] == [JOB_ID, OTHER]


def test_a_job_is_told_of_once_its_records_are_read_to_their_end(tmp_path: Path) -> None:
    jobs = tmp_path / "dsrun" / "jobs"
    with running_job(jobs) as folder:
        append_records(folder, run_lines(range(1, 601)))

        class Hasty(Clock):
            def __call__(self) -> float:
                self.now_s += 0.1
                return self.now_s

        followed = FollowedJobs((), {"XDG_STATE_HOME": str(tmp_path)}, lambda job: [], clock=Hasty())
        assert not followed.look()
        assert followed.views() == []
        while not followed.look():
            pass
        (view,) = followed.views()
    assert view.figures.last is not None
    assert view.figures.last.step == 600
