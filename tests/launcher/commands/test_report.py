"""`dsrun report`: which file it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli import invoke
from support.job_records import leave_job
from support.pages import StrictPage
from support.recorded_runs import append_records, run_lines


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = leave_job(tmp_path / "state" / "dsrun" / "jobs", "trained", outcome="done")
    append_records(folder, run_lines(range(1, 61)))
    return folder


def test_a_page_is_written_under_the_name_of_the_job_and_replaced(job: Path) -> None:
    for _ in range(2):
        result = invoke("report", "trained")
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr.startswith("dsrun: trained.html was written, ")
    page = Path("trained.html").read_text()
    assert StrictPage(page).faults == []
    assert page.startswith("<!-- dsrun report -->\n")
    assert [path.name for path in Path().iterdir()] == ["trained.html"]


def test_a_page_goes_to_stdout(job: Path) -> None:
    result = invoke("report", "last", "-o", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    assert StrictPage(result.stdout).faults == []
    assert list(Path().iterdir()) == []


def test_several_jobs_have_one_page(job: Path) -> None:
    leave_job(job.parent, "other", outcome="failed", exit_code=3)
    assert invoke("report", "trained", "other").exit_code == 0
    text = StrictPage(Path("jobs.html").read_text()).text
    assert "2 jobs: trained, other" in text
    assert "other: No step of a training was recorded" in text


def test_no_other_file_is_overwritten(job: Path) -> None:
    Path("trained.html").write_text("<p>mine</p>")
    result = invoke("report", "trained")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: trained.html is there and no report of dsrun\nhint: `-o FILE` names another; remove it if it may go\n"
    )
    assert Path("trained.html").read_text() == "<p>mine</p>"


def test_an_empty_file_may_be_written_to(job: Path) -> None:
    Path("made-by-mktemp").touch()
    assert invoke("report", "trained", "-o", "made-by-mktemp").exit_code == 0


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (".", "error: . is a folder\nhint: `-o report.html` writes a file into it\n"),
        ("/dev/null", "error: /dev/null is no file\nhint: `-o -` writes to stdout\n"),
        (
            "missing/page.html",
            "error: missing/page.html: cannot be written: no such file or directory\n"
            "hint: `-o FILE` names another place, `-o -` is stdout\n",
        ),
    ],
)
def test_a_place_that_takes_no_file_is_refused(job: Path, output: str, said: str) -> None:
    result = invoke("report", "trained", "-o", output)
    assert result.exit_code in (1, 2)
    assert result.stderr == said


def test_a_job_that_is_named_twice_or_not_there_is_refused(job: Path) -> None:
    twice = invoke("report", "trained", "last")
    assert twice.exit_code == 2
    assert twice.stderr == "error: `last` is job trained, which was named already\nhint: name each job once\n"
    assert "there is no job `nothing`" in invoke("report", "nothing").stderr
    leave_job(job.parent, "trained-too")
    leave_job(job.parent, "train")
    assert "`tr` may be" in invoke("report", "tr").stderr


def test_records_that_cannot_be_read_are_an_error(job: Path) -> None:
    (job / "records.jsonl").unlink()
    (job / "records.jsonl").mkdir()
    result = invoke("report", "trained")
    assert result.exit_code == 1
    assert result.stderr.endswith("records.jsonl: cannot be read: is a directory\n")
