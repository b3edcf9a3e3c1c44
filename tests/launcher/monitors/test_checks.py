"""What cannot work is an error before the job starts: a missing package, a folder that cannot be written to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.launcher.monitors.checks import destination, lost_secrets, problems_of
from dsrun.launcher.monitors.trackers.registry import TrackerKind
from support.tracked_runs import settings_of

GONE = {"wandb": TrackerKind(opener="x:y", package="surely_not_installed", extra="wandb")}


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    (problem,) = problems_of(settings_of("wandb"), folder=str(tmp_path), trackers=GONE)
    assert "`wandb.enabled` is true" in problem.message
    assert "no package `surely_not_installed`" in problem.message
    assert problem.hint == "pip install 'dsrun[wandb]'"


def test_a_folder_that_a_tracker_left_behind_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "surely_not_installed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert problems_of(settings_of("wandb"), folder=str(tmp_path), trackers=GONE)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    (problem,) = problems_of(settings_of("csv_monitor", output_path="out"), folder=str(tmp_path))
    assert problem.message == (
        f"`csv_monitor` writes into {tmp_path}/out/DeepSpeedJobName, and {tmp_path}/out is no folder"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    (problem,) = problems_of(settings_of("csv_monitor", output_path="out"), folder=str(tmp_path))
    assert problem.message.endswith("cannot be written to")


@pytest.mark.parametrize("job_name", ["../x", "a/../../x", "/etc"])
def test_a_run_that_would_leave_its_folder_is_refused(tmp_path: Path, job_name: str) -> None:
    (problem,) = problems_of(settings_of("csv_monitor", output_path="out", job_name=job_name), folder=str(tmp_path))
    assert problem.message == f'`csv_monitor.job_name` is "{job_name}", which is not below `output_path`'


def test_where_files_go_is_told_and_that_nobody_has_chosen_it(tmp_path: Path) -> None:
    told = destination(settings_of("csv_monitor"), str(tmp_path))
    assert told == f"files in {tmp_path}/DeepSpeedJobName, for `output_path` is empty"


def test_a_name_that_is_too_long_is_named_and_not_tried(tmp_path: Path) -> None:
    (problem,) = problems_of(settings_of("csv_monitor", job_name="x" * 300), folder=str(tmp_path))
    assert problem.message.startswith(f"`csv_monitor` writes into {tmp_path}/xxx")
    assert problem.message.endswith("file name too long")


def test_an_address_whose_password_no_variable_can_carry_is_refused(tmp_path: Path) -> None:
    settings = settings_of("aim", repo="aim://ada:hunter2hunter2@tracker:53800")
    kinds = {"aim": TrackerKind(opener="x:y")}
    (problem,) = problems_of(settings, folder=str(tmp_path), trackers=kinds)
    assert problem.message == "`aim.repo` is an address with a password, which dsrun writes into no file"


def test_an_address_that_was_not_written_down_is_asked_for_and_no_other_is_taken() -> None:
    lost = settings_of("mlflow", tracking_uri="https://ada:hunter2hunter2@tracker").without_secrets()
    (problem,) = lost_secrets(lost, {})
    assert (problem.message, problem.hint) == (
        "`mlflow.tracking_uri` holds a secret, which is written down nowhere",
        "set `MLFLOW_TRACKING_URI` where dsrun is started",
    )
    assert not lost_secrets(lost, {"MLFLOW_TRACKING_URI": "https://ada:hunter2hunter2@tracker"})
