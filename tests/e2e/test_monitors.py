"""Real jobs with trackers: they have what the records have, and a job has the same end whatever becomes of them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.cli import clean_environment

SCRIPT = """
import sys, torch, dsrun
torch.manual_seed(0)
engine, *_ = dsrun.initialize(model=torch.nn.Linear(8, 1), config=None if len(sys.argv) < 2 else eval(sys.argv[1]))
for _ in range(5):
    loss = engine(torch.randn(2, 8)).pow(2).mean()
    engine.backward(loss)
    engine.step()
"""
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "csv_monitor": {"enabled": True, "output_path": "out", "job_name": "run"},
}


def run_job(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "dsrun", "-n", "2", "--no-gpu", "--log-dir", "logs", "train.py", *words]
    environ = clean_environment(OMP_NUM_THREADS="1", **variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ, cwd=folder)


def recorded_losses(folder: Path) -> list[tuple[int, float]]:
    (records,) = (folder / "logs").glob("*/records.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    return [(line["samples"], line["loss"]) for line in lines if line["event"] == "step"]


def csv_losses(folder: Path) -> list[tuple[int, float]]:
    with (folder / "out" / "run" / "Train_Samples_train_loss.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "train_loss"]
    return [(int(samples), float(loss)) for samples, loss in rows]


def test_files_of_a_job_with_two_trackers_hold_what_its_records_hold(tmp_path: Path) -> None:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = {**CONFIG, "tensorboard": {"enabled": True, "output_path": "board"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    done = run_job(tmp_path, "--config", "ds.json")
    assert done.returncode == 0, done.stderr
    assert len(recorded_losses(tmp_path)) == 5
    assert csv_losses(tmp_path) == recorded_losses(tmp_path)
    reader = accumulator.EventAccumulator(str(tmp_path / "board" / "DeepSpeedJobName"))
    reader.Reload()
    losses = [(each.step, pytest.approx(each.value, rel=1e-6)) for each in reader.Scalars("Train/Samples/train_loss")]
    assert losses == recorded_losses(tmp_path)


def test_the_config_of_a_script_has_its_trackers_and_one_that_is_missing_fails_nothing(tmp_path: Path) -> None:
    config = {**CONFIG, "comet": {"enabled": True, "api_key": "sEcReTsEcReT", "online": True}}
    done = run_job(tmp_path, repr(config))
    assert done.returncode == 0, done.stderr
    assert csv_losses(tmp_path) == recorded_losses(tmp_path)
    assert "monitor comet" in done.stderr
    (job,) = [path for path in (tmp_path / "logs").iterdir() if path.is_dir()]
    assert all(b"sEcReTsEcReT" not in path.read_bytes() for path in job.rglob("*") if path.is_file())
    assert "sEcReTsEcReT" not in done.stdout + done.stderr


def test_a_file_with_a_tracker_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    done = run_job(tmp_path, "--config", "ds.json")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: `csv_monitor` writes into {tmp_path}/out/run, and {tmp_path}/out is no folder\n"
        "hint: name another folder with `csv_monitor.output_path`\n"
    )
    assert not (tmp_path / "logs").exists()
