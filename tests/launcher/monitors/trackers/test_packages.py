"""Trackers with packages of their own have every scalar, as their own files and readers tell; nothing is sent."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.monitor_records import MonitorSettings
from support.recorded_runs import a_step, log_line, run_lines
from support.tracked_runs import settings_of

LOSS = "Train/Samples/train_loss"
#: Given in a process of its own, as a job's are: packages leave threads, handlers and settings behind.
PROGRAM = """
import json, sys
from pathlib import Path
from dsrun.contract.monitor_records import MonitorSettings
from support.tracked_runs import run_to_its_end
job, settings, attempts = Path(sys.argv[1]), MonitorSettings.from_json(json.loads(sys.argv[2])), json.load(sys.stdin)
print("notes:", json.dumps(run_to_its_end(job, settings, attempts)))
"""


def run_in_process(
    folder: Path, settings: MonitorSettings, attempts: list[list[dict[str, Any]]], **variables: str
) -> list[str]:
    """Gives a tracker a run in a process of its own; returns what the user is told."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "job"), json.dumps(settings.to_json())],
        input=json.dumps(attempts),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("notes: ")]
    return json.loads(line.removeprefix("notes: "))


def a_run() -> list[list[dict[str, Any]]]:
    return [[*run_lines(range(1, 21)), log_line({"eval/f1": 0.5}, step=20)]]


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a file of wandb, which has the form of LevelDB's logs: blocks of 32 KiB with parts of records."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data = path.read_bytes()
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_wandb_has_every_step_at_its_samples(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[test-monitors]'")
    settings = settings_of("wandb", project="mine", group="g")
    notes = run_in_process(tmp_path, settings, [*a_run(), run_lines(range(19, 23))], WANDB_MODE="offline")
    assert notes == [
        "steps from 19 on were taken again: it takes no step that lies before its newest, and keeps the older points"
    ]
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = [*wandb_records(file)]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.display_name) == ("mine", "g", "j1")
    rows: list[Mapping[str, Any]] = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["_step"], row[LOSS]) for row in rows] == [(16 * step, a_step(step).loss) for step in range(1, 23)]
    assert [row["eval/f1"] for row in rows if "eval/f1" in row] == [0.5]


def test_comet_has_points_as_far_apart_as_the_config_says(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="comet_ml is not installed: pip install -e '.[comet]'")
    settings = settings_of("comet", project="mine", online=False, samples_log_interval=32)
    run_in_process(tmp_path, settings, a_run())
    (file,) = tmp_path.rglob("*.zip")
    with zipfile.ZipFile(file) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    losses = [(metric["step"], metric["metricValue"]) for metric in metrics if metric["metricName"] == LOSS]
    assert losses == [(16 * step, a_step(step).loss) for step in range(1, 21, 2)]


def test_mlflow_has_every_step_in_its_store(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed, which mlflow's local store needs")
    uri = f"sqlite:///{tmp_path}/runs.db"
    run_in_process(tmp_path, settings_of("mlflow", tracking_uri=uri, experiment_name="mine", run_name="r"), a_run())
    with sqlite3.connect(tmp_path / "runs.db") as database:
        (run,) = database.execute(
            "select r.name, r.status, e.name from runs r join experiments e using (experiment_id)"
        )
        rows = database.execute("select key, step, value from metrics order by step").fetchall()
    database.close()
    assert run == ("r", "FINISHED", "mine")
    assert [(step, value) for key, step, value in rows if key == LOSS] == [
        (step, a_step(step).loss) for step in range(1, 21)
    ]
    assert [value for key, _, value in rows if key == "eval/f1"] == [0.5]


def test_trackio_has_every_step_in_its_database(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed: pip install -e '.[trackio]'")
    run_in_process(tmp_path, settings_of("trackio", project="mine"), a_run(), TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    database.close()
    losses = [(name, step, json.loads(metrics)[LOSS]) for name, step, metrics in rows if LOSS in str(metrics)]
    assert losses == [("j1", step, a_step(step).loss) for step in range(1, 21)]


def test_aim_has_every_step_in_its_repository(tmp_path: Path) -> None:
    pytest.importorskip("aim", reason="aim is not installed: pip install -e '.[aim]'")
    run_in_process(tmp_path, settings_of("aim", experiment="mine"), a_run())
    # What Aim's server does when it is started; reading leaves threads behind, and is done elsewhere too.
    program = (
        "import aim, json, sys\n"
        "repo = aim.Repo(sys.argv[1])\n"
        "runs = [aim.Run(name, repo=repo, read_only=True) for name in repo.list_all_runs()]\n"
        "found = [(run.experiment, run.name, m) for run in runs for m in run.metrics() if m.name == sys.argv[2]]\n"
        "frames = [(kind, name, m.dataframe().sort_values('step')) for kind, name, m in found]\n"
        "columns = ('step', 'value')\n"
        "rows = [(kind, name, *[list(map(float, each[key])) for key in columns]) for kind, name, each in frames]\n"
        "print('rows:', json.dumps(rows))\n"
    )
    index = [str(Path(sys.executable).with_name("aim")), "storage", "--repo", str(tmp_path), "reindex"]
    subprocess.run(index, input="y\n", capture_output=True, text=True, timeout=120, check=True)
    read = [sys.executable, "-c", program, str(tmp_path), LOSS]
    done = subprocess.run(read, capture_output=True, text=True, timeout=120, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rows: ")]
    ((experiment, name, steps, losses),) = json.loads(line.removeprefix("rows: "))
    assert (experiment, name) == ("mine", "j1")
    assert [*zip(steps, losses, strict=True)] == [(step, a_step(step).loss) for step in range(1, 21)]
