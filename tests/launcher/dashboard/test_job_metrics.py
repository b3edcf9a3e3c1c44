from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.contract.step_records import SPREAD_EVENT, spread_fields
from dsrun.launcher.dashboard.job_metrics import Metric, metrics_of
from dsrun.launcher.dashboard.open_metrics import metrics_text
from dsrun.launcher.dashboard.run_view import RunView, RunWatcher
from dsrun.launcher.jobs.listing import read_job
from support.recorded_runs import a_spread, a_step, append_records, log_line, run_lines, start_line, step_line
from support.watched_jobs import JOB_ID, leave_files, leave_ranks, running_job

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def view_of(folder: Path) -> RunView:
    job = read_job(folder)
    assert job is not None
    watcher = RunWatcher(job, [], with_gpus=False)
    watcher.look(at_once=True)
    return watcher.view()


def value_of(metrics: list[Metric], name: str, /, **labels: str) -> float:
    """The one value of a metric with these labels among others."""
    (metric,) = [each for each in metrics if each.name == name]
    (value,) = [value for has, value in metric.rows if labels.items() <= has.items()]
    return value


def test_figures_have_their_unit_in_their_name_and_what_ranks_differ_in_its_median_and_maximum(tmp_path: Path) -> None:
    with running_job(tmp_path) as folder:
        leave_files(folder, records=run_lines(range(1, 60)), events=[("restart", {"attempt": 1})])
        append_records(folder, [step_line(a_step(60, total_steps=100, mfu=0.4, loss_scale=8.0, applied=False))])
        append_records(folder, [log_line({"reward": 0.5, "kl": None}, step=60)])
        leave_ranks(folder, ["w1", "w1", "w2", "w2"], idle_s={3: 41.0})
        metrics = metrics_of([view_of(folder)])
    assert value_of(metrics, "dsrun_jobs") == value_of(metrics, "dsrun_job_running", job=JOB_ID) == 1
    assert value_of(metrics, "dsrun_job", script="train.py", user="ada") == 1
    assert [value_of(metrics, f"dsrun_{name}") for name in ("ranks", "restarts", "step", "planned_steps")] == [
        4,
        1,
        60,
        100,
    ]
    assert value_of(metrics, "dsrun_loss") == a_step(60).loss
    assert value_of(metrics, "dsrun_tokens_per_second") == a_step(60).tokens_per_s
    assert value_of(metrics, "dsrun_mfu_ratio") == 0.4
    assert value_of(metrics, "dsrun_skipped_steps") == 1
    assert value_of(metrics, "dsrun_memory_bytes", tier="gpu") == 2.6e9
    assert value_of(metrics, "dsrun_phase_seconds", phase="forward", stat="median") == pytest.approx(0.014)
    assert value_of(metrics, "dsrun_phase_seconds", phase="forward", stat="max") == pytest.approx(1.3 * 0.014)
    assert value_of(metrics, "dsrun_waits_seconds", stat="max") == pytest.approx(1.3 * 0.004)
    assert value_of(metrics, "dsrun_traffic_bytes", axis="data") == 60 * 25_000_000
    assert value_of(metrics, "dsrun_last_step_timestamp_seconds") == a_step(60).time
    assert value_of(metrics, "dsrun_host_ranks", host="w2") == 2
    assert value_of(metrics, "dsrun_host_idle_seconds", host="w2") == 41
    assert value_of(metrics, "dsrun_log", name="reward") == 0.5
    assert math.isnan(value_of(metrics, "dsrun_log", name="kl"))


def test_what_is_not_known_has_no_series_and_what_is_not_finite_is_nan(tmp_path: Path) -> None:
    with running_job(tmp_path) as folder:
        names = {metric.name for metric in metrics_of([view_of(folder)])}
        assert names == {"dsrun_jobs", "dsrun_job", "dsrun_job_running", "dsrun_ranks", "dsrun_restarts"}
        bare = a_step(1, loss=None, grad_norm=None, tokens_per_s=None, model_tflops=None, hardware_tflops=None)
        append_records(folder, [step_line(bare)])
        names = {metric.name for metric in metrics_of([view_of(folder)])}
        assert not names & {"dsrun_loss", "dsrun_grad_norm", "dsrun_tokens_per_second", "dsrun_model_tflops"}
        second = replace(bare, step=2, samples=32)
        append_records(folder, [step_line(second)])
        assert value_of(metrics_of([view_of(folder)]), "dsrun_samples_per_second") == pytest.approx(16 / 0.05)
        append_records(folder, map(step_line, [a_step(3), a_step(4, loss=None, grad_norm=None)]))
        metrics = metrics_of([view_of(folder)])
        assert math.isnan(value_of(metrics, "dsrun_loss"))
        assert math.isnan(value_of(metrics, "dsrun_grad_norm"))
        assert value_of(metrics, "dsrun_phase_seconds", phase="forward", stat="rank0") == 0.014


def test_a_job_of_many_ranks_has_few_series(tmp_path: Path) -> None:
    hosts = [f"w{number}" for number in range(64) for _ in range(8)]
    phases = dict.fromkeys(("data", "script", "forward", "backward", "step", "save", "evaluate"), 0.01)
    step = a_step(
        100,
        total_steps=200,
        mfu=0.4,
        loss_scale=1.5,
        phases=phases,
        memory={"gpu": 1, "cpu": 1, "disk": 1},
        traffic=dict.fromkeys(("tensor", "pipe", "context", "expert", "replica"), 7),
    )
    spread = a_spread(100, ranks=512)
    spread = replace(spread, seconds=dict.fromkeys((*phases, "waits"), spread.seconds["forward"]))
    with running_job(tmp_path, ranks=512) as folder:
        append_records(folder, [start_line(ranks=512), *run_lines(range(80, 100), ranks=512, first=False)])
        append_records(folder, [step_line(step), {"event": SPREAD_EVENT, "time": step.time, **spread_fields(spread)}])
        leave_ranks(folder, hosts)
        metrics = metrics_of([view_of(folder)])
    count = sum(len(metric.rows) for metric in metrics if metric.name != "dsrun_jobs")
    assert count <= 40 + 3 * 64, {metric.name: len(metric.rows) for metric in metrics}


def test_the_text_is_read_by_the_strict_parser_of_open_metrics(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    with running_job(tmp_path) as folder:
        odd = {'a"b\\c\nd': 1.0, "kl": None, "\udcff": 2.0}
        leave_files(folder, records=[*run_lines(range(1, 61)), log_line(odd, step=60)], events=[("restart", {})])
        leave_ranks(folder, ["w1", "w2", "w2", "w2"])
        metrics = metrics_of([view_of(folder)])
    text, kind = metrics_text(metrics, accept=OPEN_METRICS)
    assert kind.startswith("application/openmetrics-text")
    families = {family.name: family for family in parser.text_string_to_metric_families(text.decode())}
    assert set(families) == {metric.name for metric in metrics}
    assert {name: family.type for name, family in families.items()} == {each.name: each.kind for each in metrics}
    (restarts,) = families["dsrun_restarts"].samples
    assert (restarts.name, restarts.labels, restarts.value) == ("dsrun_restarts_total", {"job": JOB_ID}, 1)
    (job,) = families["dsrun_job"].samples
    assert job.name == "dsrun_job_info"
    assert {sample.labels["name"] for sample in families["dsrun_log"].samples} == {'a"b\\c\nd', "kl", "?"}


def test_who_knows_no_open_metrics_gets_the_text_of_prometheus(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with running_job(tmp_path) as folder:
        append_records(folder, run_lines(range(1, 61)))
        text, kind = metrics_text(metrics_of([view_of(folder)]))
    assert kind.startswith("text/plain")
    families = {family.name: family.type for family in parser.text_string_to_metric_families(text.decode())}
    assert families["dsrun_loss"] == "gauge"
    assert families["dsrun_restarts"] == "counter"
