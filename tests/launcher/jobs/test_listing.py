from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import UsageError
from dsrun.launcher.jobs.listing import JobState, all_jobs, find_job, job_ids, read_job
from dsrun.launcher.jobs.lock import JobLock
from support.job_records import NOW, leave_job


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return tmp_path / "dsrun" / "jobs"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("outcome", "locked", "is_started", "state"),
    [
        (None, True, False, JobState.QUEUED),
        (None, True, True, JobState.RUNNING),
        (None, False, True, JobState.CRASHED),
        (None, False, False, JobState.CRASHED),
        ("done", False, True, JobState.DONE),
        ("failed", False, True, JobState.FAILED),
        ("stopped", False, True, JobState.STOPPED),
        # It has written how it ended and is about to let go.
        ("done", True, True, JobState.DONE),
    ],
)
def test_the_state_follows_from_the_files(
    jobs: Path, outcome: str | None, locked: bool, is_started: bool, state: JobState
) -> None:
    folder = leave_job(jobs, "a", outcome=outcome, started=NOW if is_started else None)
    lock = JobLock(folder) if locked else None
    job = read_job(folder)
    assert job is not None
    assert job.state is state
    assert job.state.is_live == (locked and outcome is None)
    assert job.exit_code == (None if outcome is None else 0)
    assert job.ended == (None if outcome is None else NOW + timedelta(minutes=2))
    if lock is not None:
        lock.release()


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 2},
        {"outcome": "flying"},
        {"ended": "yesterday"},
        {"exit_code": None},
        {"failure": "no list"},
        {"run_dir": None},
    ],
)
def test_an_outcome_that_cannot_be_read_is_unknown_and_hides_no_other_job(
    jobs: Path, environ: dict[str, str], changes: dict[str, object]
) -> None:
    path = JobPaths(leave_job(jobs, "a", outcome="done")).outcome
    leave_job(jobs, "b", outcome="done")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert {job.id: job.state for job in all_jobs(environ)} == {"a": JobState.UNKNOWN, "b": JobState.DONE}
    assert find_job("a", environ).exit_code is None
    path.write_text("{")
    assert find_job("a", environ).state is JobState.UNKNOWN


def test_jobs_come_newest_first_and_folders_without_record_not_at_all(jobs: Path, environ: dict[str, str]) -> None:
    for minutes, job_id in enumerate(["b", "c", "a"]):
        leave_job(jobs, job_id, created=NOW + timedelta(minutes=minutes))
    (jobs / "empty").mkdir()
    (jobs / "file").write_text("")
    assert [job.id for job in all_jobs(environ)] == ["a", "c", "b"]


def test_jobs_elsewhere_are_found_by_their_link(tmp_path: Path, jobs: Path, environ: dict[str, str]) -> None:
    leave_job(tmp_path / "mine", "a")
    jobs.mkdir(parents=True)
    (jobs / "a").symlink_to(tmp_path / "mine" / "a")
    (jobs / "gone").symlink_to(tmp_path / "mine" / "gone")
    assert [job.folder for job in all_jobs(environ)] == [tmp_path / "mine" / "a"]
    assert find_job("a", environ).folder == tmp_path / "mine" / "a"
    assert job_ids(environ) == ["a"]


def test_where_no_job_ever_was_there_are_none(environ: dict[str, str]) -> None:
    assert all_jobs(environ) == []
    with pytest.raises(UsageError, match="there is no job in"):
        find_job("last", environ)


IDS = ["20261120-0733-x7k2", "20261121-0733-abcd", "20261121-0734-efgh"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (IDS[0], IDS[0]),
        ("20261120", IDS[0]),
        ("20261121-0734", IDS[2]),
        ("abcd", IDS[1]),
        ("last", IDS[2]),
    ],
)
def test_a_job_is_found_by_what_tells_it_from_others(
    jobs: Path, environ: dict[str, str], name: str, found: str
) -> None:
    for minutes, job_id in enumerate(IDS):
        leave_job(jobs, job_id, created=NOW + timedelta(minutes=minutes))
    assert find_job(name, environ).id == found


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "20261121",
            "`20261121` may be `20261121-0734-efgh`, `20261121-0733-abcd`",
            "write more of the id, or its last four letters",
        ),
        (
            "20261121-0733-abce",
            "there is no job `20261121-0733-abce` in ",
            "did you mean `20261121-0733-abcd` or ",
        ),
        ("zzz", "there is no job `zzz` in ", "`dsrun ps --all` lists all jobs"),
        ("", "there is no job `` in ", "`dsrun ps --all` lists all jobs"),
        ("../jobs", "there is no job `../jobs` in ", "`dsrun ps --all` lists all jobs"),
    ],
)
def test_a_name_of_none_or_several_is_refused_with_those_it_may_mean(
    jobs: Path, environ: dict[str, str], name: str, message: str, hint: str
) -> None:
    for job_id in IDS:
        leave_job(jobs, job_id)
    with pytest.raises(UsageError) as raised:
        find_job(name, environ)
    assert str(raised.value).startswith(message)
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(hint)


def test_a_folder_without_record_is_named(jobs: Path, environ: dict[str, str]) -> None:
    (jobs / "old").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no record of a job that this dsrun can read"):
        find_job("old", environ)


def test_a_state_folder_that_is_none_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "dsrun").write_text("")
    with pytest.raises(UsageError, match="dsrun/jobs: cannot be read: not a directory"):
        all_jobs(environ)
