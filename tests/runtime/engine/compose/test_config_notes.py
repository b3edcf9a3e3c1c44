"""A config's trackers stand in the records, without secrets; where there are none, that is said once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.config.load import load
from dsrun.contract.monitor_records import read_monitors
from dsrun.runtime.engine.compose.config_notes import record_monitors
from dsrun.runtime.observe.records import RecordWriter

CONFIG = load(
    {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": "out"},
        "comet": {"enabled": True, "api_key": "a-secret-key"},
        "mlflow": {"enabled": True, "tracking_uri": "https://ada:pw@host/x"},
        "wandb": {"enabled": False},
    }
)


def test_trackers_are_recorded_without_their_secrets(tmp_path: Path) -> None:
    record_monitors(CONFIG, RecordWriter(tmp_path / "records.jsonl"), is_recorded=True)
    text = (tmp_path / "records.jsonl").read_text()
    assert "a-secret-key" not in text
    assert "ada:pw" not in text
    csv, comet, mlflow = read_monitors(json.loads(text))
    assert (csv.name, csv.options, csv.with_timers) == (
        "csv_monitor",
        {"output_path": "out", "job_name": "DeepSpeedJobName"},
        True,
    )
    assert (comet.left_out, mlflow.left_out) == (("api_key",), ("tracking_uri",))


def test_a_run_without_records_says_that_trackers_get_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        record_monitors(CONFIG, RecordWriter(None), is_recorded=False)
    assert capsys.readouterr().out == (
        "dsrun: `csv_monitor`, `comet`, `mlflow` of this config get nothing: trackers are fed by dsrun's launcher, and "
        "this job was not started by it; start it with `dsrun SCRIPT`\n"
    )


def test_a_config_without_trackers_says_and_records_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0})
    record_monitors(config, RecordWriter(tmp_path / "records.jsonl"), is_recorded=True)
    record_monitors(config, RecordWriter(None), is_recorded=False)
    assert not (tmp_path / "records.jsonl").exists()
    assert capsys.readouterr().out == ""
