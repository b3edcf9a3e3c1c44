"""The page: whole HTML and SVG, nothing from outside, everything escaped and masked, and what stands on it."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.jobs.listing import read_job
from dsrun.launcher.masking import Masker
from dsrun.launcher.web_report.job_source import read_source
from dsrun.launcher.web_report.page import page_of
from support.job_records import leave_job
from support.pages import StrictPage, svgs_of
from support.recorded_runs import a_step, append_records, log_line, run_lines, start_line, step_line
from support.report_jobs import leave_trained_job

NOW = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
MARKUP = '<script>alert("1")</script>&\'"><b>'


def page(*folders: Path, masker: Masker | None = None) -> str:
    masker = masker or Masker()
    jobs = [read_job(folder) for folder in folders]
    text = page_of([read_source(job, masker) for job in jobs if job is not None], now=NOW, masker=masker)
    text.encode()
    return text


def checked(text: str) -> StrictPage:
    """Takes a page apart that has no fault."""
    parsed = StrictPage(text)
    assert parsed.faults == []
    assert parsed.requests == []
    assert all(svg.get("aria-label") for svg in svgs_of(text))
    return parsed


def titles(text: str) -> list[str | None]:
    return [svg.get("aria-label") for svg in svgs_of(text)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_trained_job(tmp_path_factory.mktemp("jobs"), "20261123-0840-k3vf")


def test_a_whole_job_has_every_plot(trained: Path) -> None:
    text = page(trained)
    parsed = checked(text)
    assert titles(text) == [
        *("Loss", "Loss", "What happened", "Tokens a second", "TFLOP/s", "MFU", "Step time by phase", "Waits by rank"),
        *("Memory: device", "Memory: host (resident)", "Traffic by axis", "Learning rate", "Gradient norm"),
        *("entropy", "eval/loss", "eval/accuracy"),
    ]
    assert "8 ranks on gpu1, made 2026-11-23 08:40, ran for 23m 4s, step 600 of 600, exit code 0" in parsed.text
    assert "30 steps were taken again after a failure" in parsed.text
    assert "Rank 5 is waited for" in parsed.text
    assert "Rank 5 waits least" in parsed.text
    assert "rank 3 on gpu1 was killed by SIGKILL" in parsed.text
    assert "git 8d0f3a5c41be" in parsed.text
    assert len(text) < 500_000


def test_only_values_that_somebody_set_stand_outside_of_the_defaults(trained: Path) -> None:
    text = page(trained)
    config = text[text.index('id="config"') : text.index('id="job"')]
    written, defaults = config.split("<details>")
    assert "zero_optimization.stage" in written
    assert "gradient_predivide_factor" not in written
    assert "gradient_predivide_factor" in defaults


def test_jobs_are_compared_by_their_curves_figures_and_configs(trained: Path, tmp_path: Path) -> None:
    other = leave_trained_job(tmp_path, "20261124-0730-t2hd", steps=300, lr=1e-4, stage=3, fails_at=None, seed=2)
    text = page(trained, other)
    parsed = checked(text)
    assert titles(text)[:4] == ["Loss by step", "Loss by time", "Tokens a second", "Step time"]
    names = {each.get("data-series") for each in svgs_of(text)[0].iter("path")} - {None}
    assert names == {"k3vf", "t2hd"}
    assert "zero_optimization.stage 2 3" in parsed.text
    assert "bf16.enabled" not in parsed.text
    assert (
        "command dsrun -n 8 pretrain.py --lr 0.0003 --config ds.json dsrun -n 8 pretrain.py --lr 0.0001" in parsed.text
    )


def test_a_job_without_records_shows_its_failure_and_config(tmp_path: Path) -> None:
    failure = ["rank 1 on gpu1 (pid 7) exited with code 1", "  RuntimeError: no"]
    folder = leave_job(tmp_path, "broken", outcome="failed", exit_code=1, failure=failure)
    (folder / "config.json").write_text('{"train_batch_size": 4}')
    (folder / "rank1.log").write_text("loading\n\x1b[31mRuntimeError: no\x1b[0m\n")
    events = [
        {"event": "start", "time": 1795246381.0, "attempt": 0, "world_size": 2, "hosts": ["gpu1"], "resume": None},
        {"event": "rank_exit", "time": 1795246390.0, "rank": 1, "host": "gpu1", "status": 1, "oom": None},
        {"event": "rank_exit", "time": 1795246391.0, "rank": 0, "host": "gpu1", "status": -15, "oom": None},
        {"event": "end", "time": 1795246391.5, "outcome": "failed", "exit_code": 1, "attempts": 1},
    ]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events) + '{"event": "sta')
    text = page(folder)
    parsed = checked(text)
    assert titles(text) == ["What happened"]
    assert "No step of a training was recorded" in parsed.text
    assert "rank 1 on gpu1 (pid 7) exited with code 1" in parsed.text
    assert "Last lines of rank 1 loading RuntimeError: no" in parsed.text
    assert "train_batch_size 4" in parsed.text
    assert "killed by SIGTERM" not in parsed.text, "ranks that were stopped for a failure are none of their own"


def test_last_lines_that_the_verdict_has_are_not_repeated(tmp_path: Path) -> None:
    failure = ["error: rank 1 on gpu1 exited with code 1", "last lines of rank 1:", "  | out of ideas"]
    folder = leave_job(tmp_path, "broken", outcome="failed", exit_code=1, failure=failure)
    (folder / "rank1.log").write_text("out of ideas\n")
    assert checked(page(folder)).text.count("out of ideas") == 1


@pytest.mark.parametrize(
    "config", ['{"train_batch_size": "many"}', "{", "- 1\n- 2\n", '{"no_such_key": {"a": [1, 2]}}']
)
def test_a_config_that_is_refused_is_shown_as_it_was(tmp_path: Path, config: str) -> None:
    folder = leave_job(tmp_path, "odd", outcome="done")
    (folder / "config.json").write_text(config)
    text = checked(page(folder)).text
    assert "its values are shown as they were written" in text or "neither JSON nor YAML" in text


@pytest.mark.parametrize(
    "config",
    [
        '{"train_batch_size":\t4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}',
        "train_batch_size: 4\noptimizer: {type: Adam, params: {lr: 0.001}}\n",
    ],
)
def test_a_config_is_read_as_json_or_yaml(tmp_path: Path, config: str) -> None:
    folder = leave_job(tmp_path, "odd", outcome="done")
    (folder / "config.json").write_text(config)
    assert "optimizer.params.lr 0.001" in checked(page(folder)).text


def test_markup_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    folder = leave_job(
        tmp_path,
        "odd",
        outcome="failed",
        exit_code=1,
        failure=[f"rank 0 on {MARKUP} exited with code 1"],
        command=("run", MARKUP),
        hosts=(MARKUP,),
        user=MARKUP,
    )
    (folder / "rank0.log").write_text(f"{MARKUP}\n]]>\x00\x1b[2J\n")
    (folder / "config.json").write_text(json.dumps({MARKUP: MARKUP}))
    (folder / "events.jsonl").write_text(
        json.dumps({"event": "waiting", "time": 1795246381.0, "text": f"{MARKUP}\ud800\x07"}) + "\n"
    )
    lines = [log_line({MARKUP: 0.1 * step}, step=step) for step in range(1, 5)]
    traffic = [step_line(a_step(step, traffic={MARKUP: 5}, memory={MARKUP: 7})) for step in range(1, 5)]
    append_records(folder, [start_line(), *traffic, *lines])
    text = page(folder)
    parsed = checked(text)
    assert len(parsed.names("script")) == 1
    assert parsed.names("b") == []
    assert parsed.text.count('<script>alert("1")</script>') >= 7
    assert "]]>" in parsed.text


def test_secrets_are_masked_wherever_they_stand(tmp_path: Path) -> None:
    token, key = "hf_" + "a" * 24, "correct-horse-battery"
    folder = leave_job(
        tmp_path, "leaky", outcome="failed", exit_code=1, failure=[f"rank 0 on a failed: {token}"], command=("run", key)
    )
    (folder / "rank0.log").write_text(f"login with {key} and {token}\n")
    (folder / "config.json").write_text(json.dumps({"comet": {"api_key": key, "project": token}}))
    append_records(folder, [start_line(), step_line(a_step(1)), log_line({key: 1.0}, step=1)])
    text = page(folder, masker=Masker([{"MY_API_KEY": key}]))
    checked(text)
    assert key not in text
    assert token not in text
    assert "***" in text


def test_losses_that_are_not_finite_leave_a_gap_and_a_mark(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "odd", outcome="done")
    lost = [step_line(a_step(step, **({"loss": None} if 40 <= step < 50 else {}))) for step in range(1, 101)]
    append_records(folder, [start_line(), *lost])
    (svg, *_) = svgs_of(page(folder))
    (raw,) = [each for each in svg.iter("path") if "faint" in (each.get("class") or "")]
    (mark,) = [each for each in svg.iter("path") if "missing" in (each.get("class") or "")]
    assert (raw.get("d") or "").count("M") == 2
    assert (mark.get("d") or "").count("M") == 10


def test_a_loss_that_stays_lost_is_not_told_as_the_last_one_that_was_known(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "odd", outcome="done")
    lost = [step_line(a_step(step, **({"loss": None} if step > 50 else {}))) for step in range(1, 101)]
    append_records(folder, [start_line(), *lost])
    text = page(folder)
    assert "not finite last step; 3." in " ".join(checked(text).text.split())
    (svg, *_) = svgs_of(text)
    (smooth,) = [each for each in svg.iter("path") if each.get("data-series") == "smoothed"]
    (mark,) = [each for each in svg.iter("path") if "missing" in (each.get("class") or "")]
    assert (mark.get("d") or "").count("M") == 50
    x_of_last = float((smooth.get("d") or "").split()[-2])
    assert x_of_last == pytest.approx(1000 * 49 / 99, abs=0.1)


def test_a_timeline_has_the_last_of_very_many_checkpoints_and_failures(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "long", outcome="failed", failure=["rank 3 ended with exit code 1"])
    saved = [{"event": CHECKPOINT_EVENT, "time": NOW.timestamp() + at, "step": at} for at in range(1000)]
    append_records(folder, [start_line(), *saved])
    exits = [(rank, 0) for rank in range(20_000)] + [(3, 1), (4, -15)]
    with JobPaths(folder).events.open("w") as file:
        for at, (rank, status) in enumerate(exits):
            event = {"event": "rank_exit", "time": NOW.timestamp() + at, "rank": rank, "status": status}
            file.write(json.dumps(event) + "\n")
    text = page(folder)
    assert "checkpoint of step 999<" in text
    assert 100 < text.count("checkpoint of step") <= 300
    assert "rank 3 exited with code 1" in text.split('id="timeline"')[1]
    assert "rank 4" not in text


@pytest.mark.parametrize("plan", [{"program": {"target": "train.py"}}, {"nodes": [{"workers": []}]}])
def test_a_plan_of_another_version_is_told(tmp_path: Path, plan: dict[str, Any]) -> None:
    folder = leave_job(tmp_path, "old", outcome="done", plan=plan)
    assert "of another version of dsrun, or damaged; job.json has it" in checked(page(folder)).text


@pytest.mark.parametrize(
    "probe", [[], {"cpu": [[]]}, {"host": {"name": "gpu1"}}, {"gpus": [None]}, {"memory": {"total_bytes": ["x"]}}]
)
def test_facts_of_another_version_are_told(tmp_path: Path, probe: object) -> None:
    folder = leave_job(tmp_path, "old", outcome="done")
    facts = {"schema_version": 1, "probe": probe, "git": {"commit": "abc"}}
    JobPaths(folder).machine.write_text(json.dumps(facts))
    text = checked(page(folder)).text
    assert ("of another version of dsrun, or damaged; machine.json has it" in text) == bool(probe)
    assert "abc, changes unknown" in text


def test_ranks_of_another_version_end_no_report(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "old", outcome="done")
    outcome = json.loads(JobPaths(folder).outcome.read_text())
    JobPaths(folder).outcome.write_text(json.dumps({**outcome, "ranks": [{"rank": "first"}]}))
    assert "of another version of dsrun, or damaged; outcome.json has it" in checked(page(folder)).text


@pytest.mark.parametrize("time", ["1e300", "-1e300", "NaN", "Infinity", "1" + "0" * 400, "253402300800", '"now"'])
def test_an_event_of_no_date_is_left_out(tmp_path: Path, time: str) -> None:
    folder = leave_job(tmp_path, "odd", outcome="failed")
    with JobPaths(folder).events.open("w") as file:
        file.write(f'{{"event": "host_lost", "host": "gpu7", "time": {time}}}\n')
        file.write(f'{{"event": "host_lost", "host": "gpu8", "time": {NOW.timestamp()}}}\n')
    text = page(folder)
    checked(text)
    assert "gpu8" in text
    assert "gpu7" not in text


@pytest.mark.parametrize("event", ["start", "step", "checkpoint", "waits"])
@pytest.mark.parametrize("time", [1e300, -1e300, math.nan, 253402300800])
def test_a_record_of_no_date_is_told(tmp_path: Path, event: str, time: float) -> None:
    folder = leave_job(tmp_path, "odd", outcome="done")
    lines = [start_line(), *run_lines(range(1, 51))]
    at = [line["event"] for line in lines].index(event)
    append_records(folder, [*lines[:at], {**lines[at], "time": time}, *lines[at + 1 :]])
    assert "1 records are of another version or damaged" in checked(page(folder)).text


def test_records_of_another_version_are_told(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "odd", outcome="done")
    append_records(folder, [*run_lines(range(1, 41)), {"event": "step", "step": 41}, {"event": "news"}])
    assert "1 records are of another version or damaged" in checked(page(folder)).text


def test_a_million_points_make_a_small_page(tmp_path: Path) -> None:
    """Of twenty thousand steps, at which every curve is thinned as it is of a million."""
    folder = leave_job(tmp_path, "long", outcome="done")
    append_records(folder, [start_line(), *(step_line(a_step(step)) for step in range(1, 20_001))])
    text = page(folder)
    longest = max(len(each.get("d") or "") for svg in svgs_of(text) for each in svg.iter("path"))
    assert longest < 30_000
    assert len(text) < 500_000


def test_steps_that_tell_nothing_more_than_they_must_are_drawn(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "plain", outcome="done")
    bare = {"loss": None, "grad_norm": None, "memory": {}, "phases": {}, "traffic": {}, "waits_s": None}
    bare |= {"tokens": None, "tokens_per_s": None, "model_tflops": None, "hardware_tflops": None, "memory_bytes": 0}
    append_records(folder, [step_line(a_step(1, **bare))])
    assert titles(page(folder)) == ["Samples a second", "Step time", "Learning rate"]
