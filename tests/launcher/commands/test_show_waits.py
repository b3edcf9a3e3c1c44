"""`dsrun show JOB --waits` on records that a run would have left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.contract.wait_records import WaitRecord, WaitSpread, to_fields
from support.cli import invoke
from support.job_records import leave_job

REDUCE = WaitSpread(
    label="reduce_scatter of unit 3",
    waits=1.0,
    least_s=0.0004,
    median_s=0.0114,
    most_s=0.0118,
    least_rank=3,
    most_rank=1,
)
RECORD = WaitRecord(
    step=40, steps=20, step_s=0.06, ranks=4, total=replace(REDUCE, label="all", waits=5.5), labels=(REDUCE,)
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return leave_job(tmp_path / "dsrun" / "jobs", "trained", outcome="done")


def leave(folder: Path, record: WaitRecord) -> None:
    (folder / "records.jsonl").write_text(json.dumps({"event": "waits", "time": 1.0, **to_fields(record)}) + "\n")


def test_the_answer_comes_in_words_and_the_figures_below(job: Path) -> None:
    leave(job, RECORD)
    assert invoke("show", "trained", "--waits").stdout.splitlines() == [
        "rank 3 is waited for: the others stand 11 ms a step longer in reduce_scatter of unit 3, 18% of a step in all",
        "",
        "steps 21 to 40, 4 ranks, 60 ms a step; ms and waits are those of a step",
        "COLLECTIVE                WAITS  LEAST  MEDIAN  MOST   LEAST RANK  MOST RANK",
        "reduce_scatter of unit 3  1      0.40   11.40   11.80  3           1",
        "all                       5.5    0.40   11.40   11.80  3           1",
    ]


def test_where_all_wait_alike_nobody_is_named(job: Path) -> None:
    leave(job, replace(RECORD, total=replace(REDUCE, label="all", least_s=0.011)))
    first = invoke("show", "trained", "--waits").stdout.splitlines()[0]
    assert first == ("no rank is waited for: all wait about alike, longest in reduce_scatter of unit 3, 11.4 ms a step")


def test_json_has_the_record_and_the_rank(job: Path) -> None:
    leave(job, RECORD)
    value = json.loads(invoke("show", "trained", "--waits", "--json").stdout)
    assert (value["id"], value["waited_for"]["rank"]) == ("trained", 3)
    assert value["waits"]["labels"][0]["most_s"] == 0.0118


def test_a_job_without_records_of_waits_says_when_there_are_some(job: Path) -> None:
    del job
    shown = invoke("show", "trained", "--waits")
    assert shown.exit_code == 2
    assert "error: job trained: its ranks have recorded no waits" in shown.stderr
    assert "every 20 optimizer steps" in shown.stderr
    empty = json.loads(invoke("show", "trained", "--waits", "--json").stdout)
    assert (empty["waits"], empty["waited_for"]) == (None, None)
