"""The `export` verb: records of an old job go to a tracker, from where it stopped or from the beginning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dsrun.launcher.jobs.lock import JobLock
from support.cli import invoke
from support.job_records import leave_job
from support.recorded_runs import append_records, run_lines
from support.tracked_runs import give, settings_of

CSV = settings_of("csv_monitor", output_path="out", job_name="run")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = leave_job(tmp_path / "dsrun" / "jobs", "a", outcome="done", cwd=str(tmp_path))
    append_records(folder, run_lines(range(1, 6)))
    return folder


def steps_in(file: Path) -> list[str]:
    return [line.partition(",")[0] for line in file.read_text().splitlines()[1:]]


def test_a_tracker_that_was_behind_goes_on_with_the_settings_it_had(job: Path, tmp_path: Path) -> None:
    assert give(job, CSV, []).state.step == 5
    append_records(job, run_lines(range(6, 8), first=False))
    result = invoke("export", "a", "--to", "csv")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "csv_monitor has all steps up to 7" in result.stderr
    assert invoke("export", "a", "--to", "csv").stderr.startswith("dsrun: csv_monitor has all records already")


def test_another_folder_gets_the_run_from_its_beginning(job: Path, tmp_path: Path) -> None:
    assert invoke("export", "a", "--to", "csv", "--output", str(tmp_path / "other")).exit_code == 0
    assert steps_in(tmp_path / "other" / "DeepSpeedJobName" / "Train_Samples_lr.csv") == ["16", "32", "48", "64", "80"]


def test_the_same_folder_again_has_every_step_once(job: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert invoke("export", "a", "--to", "csv", "--output", str(tmp_path / "other"), "--again").exit_code == 0
    run = tmp_path / "other" / "DeepSpeedJobName"
    assert steps_in(run / "Train_Samples_lr.csv") == ["16", "32", "48", "64", "80"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "tensorbord"], "dsrun knows no such tracker\nhint: there are tensorboard, csv, wandb, comet"),
        (["--to", "wandb", "--output", "x"], "`--output` is for trackers that write files, and `wandb` is none"),
    ],
)
def test_what_cannot_be_is_refused(job: Path, words: list[str], says: str) -> None:
    result = invoke("export", "a", *words)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_job_that_runs_gives_its_records_itself(job: Path) -> None:
    give(job, CSV, [])
    (job / "outcome.json").unlink()
    lock = JobLock(job)
    result = invoke("export", "a", "--to", "csv")
    lock.release()
    assert (result.exit_code, result.stderr) == (
        2,
        "error: job a is running, and gives its records to `csv_monitor` itself\n",
    )


def test_a_job_without_records_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    leave_job(tmp_path / "dsrun" / "jobs", "a", outcome="done", cwd=str(tmp_path))
    assert "job a has no records" in invoke("export", "a", "--to", "csv").stderr


def test_a_folder_of_the_job_that_is_gone_is_not_said_to_have_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = leave_job(tmp_path / "dsrun" / "jobs", "a", outcome="done", cwd=str(tmp_path / "gone"))
    append_records(folder, run_lines(range(1, 3)))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = invoke("export", "a", "--to", "csv")
    assert f"files in {tmp_path}/here/DeepSpeedJobName" in result.stderr
    assert (tmp_path / "here" / "DeepSpeedJobName" / "Train_Samples_lr.csv").exists()


def test_a_failure_of_a_package_is_told_without_the_key_that_it_quotes(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef0123"
    monkeypatch.setenv("COMET_API_KEY", key)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "comet_ml.py").write_text(
        "import os\nExperimentConfig = dict\n"
        "def start(**_):\n    raise ValueError(f'{os.getcwd()}: no key {os.environ[\"COMET_API_KEY\"]}')\n"
    )
    monkeypatch.delitem(sys.modules, "comet_ml", raising=False)
    result = invoke("export", "a", "--to", "comet")
    # Not by monkeypatch, which would put it back at the end, for tests of the real one to find.
    del sys.modules["comet_ml"]
    assert (result.exit_code, result.stderr.splitlines()[0]) == (
        1,
        f"error: `comet` does not take the records of job a: ValueError: {tmp_path}: no key ***",
    )
