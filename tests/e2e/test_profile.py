"""Real jobs that are profiled: the merged trace has both ranks, our labels and these steps alone, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.records.follow import RecordFollower
from support.live_job import LiveJob, live_job
from support.rank_traces import read_trace

FIRST, LAST, STEPS = 2, 3, 5
SCRIPT = f"""
import os, signal
import torch
from torch import nn
import dsrun

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(x)

config = {{
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {{"type": "Adam", "params": {{"lr": 1e-3}}}},
    "zero_optimization": {{"stage": 3}},
}}
engine, *_ = dsrun.initialize(model=nn.Sequential(Block(), Block()), config=config)
for step in range({STEPS}):
    if "DIES" in os.environ and step == {LAST - 1} and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    engine.backward(engine(torch.ones(1, 64)).square().mean())
    engine.step()
"""

pytestmark = pytest.mark.timeout(120)


def paths_of(job: LiveJob) -> JobPaths:
    (folder,) = job.folders
    return JobPaths(folder)


def test_both_ranks_are_traced_in_these_steps_alone_and_merged_on_one_clock(tmp_path: Path) -> None:
    with live_job(tmp_path, SCRIPT, "-n", "2", "--profile", f"steps={FIRST}:{LAST},ranks=all") as job:
        said = job.end()
        table = json.loads(job.ask("trace", "last", "--json"))
        text = job.ask("trace", "last", "--ranks", "1", "-o", "one.json.gz")
    paths = paths_of(job)
    assert f"{paths.merged_trace} shows ranks 0, 1" in said
    merged = read_trace(paths.merged_trace)
    events: list[dict[str, Any]] = merged["traceEvents"]
    begin_s = merged["baseTimeNanoseconds"] / 1e9

    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(rows.values()) == {"launcher", "rank 0 (localhost)", "rank 1 (localhost)"}
    for rank in range(2):
        labels = [event for event in events if event.get("cat") == "user_annotation" and event["pid"] == rank + 1]
        names = [label["name"] for label in labels]
        assert [name for name in names if name.startswith("step ")] == [f"step {FIRST}", f"step {LAST}"]
        for name in ("forward", "forward 0", "backward", "step", "wait all_gather of unit 0 `0`"):
            assert names.count(name) >= LAST - FIRST + 1, name

    # The steps of the trace lie where the records of rank 0 and the launcher's events have them: rank 0 writes the
    # record of a step within it, and rank 1 is in the same step, whose collectives both enter.
    records = {record["step"]: record for record in RecordFollower(paths.records).read() if record["event"] == "step"}
    for step in range(FIRST, LAST + 1):
        spans_s = {
            label["pid"] - 1: (begin_s + label["ts"] / 1e6, begin_s + (label["ts"] + label["dur"]) / 1e6)
            for label in events
            if label.get("cat") == "user_annotation" and label["name"] == f"step {step}"
        }
        assert spans_s[0][0] - 0.02 < records[step]["time"] < spans_s[0][1] + 0.02
        assert spans_s[1][0] < spans_s[0][1]
        assert spans_s[0][0] < spans_s[1][1]
    instants = {event["name"]: event["ts"] for event in events if event["ph"] == "i"}
    spans = [event for event in events if event["ph"] == "X" and event["pid"] > 0]
    first_us, last_us = min(span["ts"] for span in spans), max(span["ts"] + span["dur"] for span in spans)
    assert instants["attempt 1 starts"] < instants["rank 0 starts"] < first_us
    assert last_us < instants["rank 0 ends with 0"]

    assert [(each["rank"], [step["step"] for step in each["steps"]]) for each in table["ranks"]] == [
        (0, [FIRST, LAST]),
        (1, [FIRST, LAST]),
    ]
    for step in (step for each in table["ranks"] for step in each["steps"]):
        assert 0 < step["cpu_ops_s"] + step["waits_s"] <= step["seconds"]
    # Which of them take most is a matter of microseconds here; `aten::addmm` is the forward's own.
    for rank in range(2):
        ops = {event["name"] for event in events if event.get("cat") == "cpu_op" and event["pid"] == rank + 1}
        assert "aten::addmm" in ops
        most = [(operation["name"], operation["seconds"]) for operation in table["ranks"][rank]["operations"]]
        assert len(most) == 10
        assert {name for name, _ in most} <= ops
        assert most == sorted(most, key=lambda each: -each[1])
    assert text.startswith("one.json.gz\n")
    assert {event["pid"] for event in read_trace(tmp_path / "one.json.gz")["traceEvents"]} == {0, 2}


def test_a_rank_that_is_killed_within_the_steps_leaves_no_half_trace_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIES", "1")
    with live_job(tmp_path, SCRIPT, "-n", "2", "--profile", f"steps={FIRST}:{LAST},ranks=all") as job:
        exit_code, said = job.wait()
    assert exit_code == 137
    paths = paths_of(job)
    assert "--profile: no rank has left a trace: " in said
    assert not [path.name for path in paths.folder.iterdir() if "trace" in path.name and "nccl" not in path.name]
