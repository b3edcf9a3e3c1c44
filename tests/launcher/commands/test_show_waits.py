"""`dsrun show JOB --waits` on records that a run would have left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.contract.wait_records import WaitRecord, WaitSpread, to_fields
from dsrun.launcher.jobs.lock import JobLock
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
        "rank 3 is waited for: the others wait 11 ms a step longer in reduce_scatter of unit 3, 18% of a step in all",
        "",
        "steps 21 to 40, 4 ranks, 60 ms a step; ms and waits are those of a step",
        "COLLECTIVE                WAITS  LEAST  MEDIAN  MOST   LEAST RANK  MOST RANK",
        "reduce_scatter of unit 3  1      0.40   11.40   11.80  3           1",
        "all                       5.5    0.40   11.40   11.80  3           1",
    ]


def first_line(folder: Path, record: WaitRecord) -> str:
    leave(folder, record)
    return invoke("show", "trained", "--waits").stdout.splitlines()[0]


def test_waits_in_many_collectives_are_told_by_kind(job: Path) -> None:
    kind = replace(REDUCE, label="reduce_scatter", least_s=0.01, median_s=0.04, most_s=0.05)
    assert first_line(job, replace(RECORD, kinds=(kind,), total=replace(kind, label="all"), step_s=0.15)) == (
        "rank 3 is waited for: the others wait 30 ms a step longer in reduce_scatter, "
        "most in reduce_scatter of unit 3, 11 ms; 20% of a step in all"
    )
    assert first_line(job, replace(RECORD, kinds=(kind,), labels=(), step_s=0.06)) == (
        "rank 3 is waited for: the others wait 30 ms a step longer in reduce_scatter; 18% of a step in all"
    )
    assert first_line(job, replace(RECORD, labels=())) == (
        "rank 3 is waited for: the others wait 11 ms a step longer, 18% of a step in all"
    )


def test_several_ranks_are_named_as_a_set(job: Path) -> None:
    waited_s = {rank: 0.0004 if rank >= 4 else 0.0114 for rank in range(8)}
    total = replace(RECORD.total, median_s=0.0059)
    barrier = replace(total, label="barrier", least_rank=6)
    record = replace(RECORD, ranks=8, waited_s=waited_s, total=total, labels=(barrier,))
    assert first_line(job, record) == (
        "ranks 4-7 are waited for: the others wait 11 ms a step longer in barrier, 18% of a step in all"
    )


def test_where_waits_differ_they_are_not_called_alike_though_nobody_is_named(job: Path) -> None:
    """Most ranks are slow, so none is slower than most."""
    total = replace(RECORD.total, least_s=0.012, median_s=0.0121, most_s=0.04, least_rank=5, most_rank=1)
    assert first_line(job, replace(RECORD, ranks=8, total=total)) == (
        "no rank stands out, but waits differ by 28 ms a step: rank 5 waits least, rank 1 most"
    )
    waited_s = {rank: 0.0399 if rank < 3 else 0.0121 for rank in range(8)}
    assert first_line(job, replace(RECORD, ranks=8, total=total, waited_s=waited_s)) == (
        "no rank stands out, but waits differ by 28 ms a step: ranks 3-7 wait least, ranks 0-2 most"
    )


def test_where_all_wait_alike_nobody_is_named(job: Path) -> None:
    total = replace(REDUCE, label="all", least_s=0.011)
    assert first_line(job, replace(RECORD, total=total)) == (
        "no rank is waited for: all wait about alike, longest in reduce_scatter of unit 3, 11.4 ms a step"
    )


def test_json_has_the_record_and_the_ranks(job: Path) -> None:
    leave(job, replace(RECORD, waited_s={0: 0.0114, 1: 0.0118, 2: 0.0114, 3: 0.0004}))
    value = json.loads(invoke("show", "trained", "--waits", "--json").stdout)
    assert (value["id"], value["waited_for"]["ranks"], value["waited_for"]["lost_s"]) == ("trained", [3], 0.011)
    assert value["waits"]["labels"][0]["most_s"] == 0.0118
    assert value["waits"]["waited_s"]["3"] == 0.0004


@pytest.mark.parametrize("runs", [False, True])
def test_a_job_without_records_of_waits_says_when_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = leave_job(tmp_path / "dsrun" / "jobs", "young", outcome=None if runs else "done")
    lock = JobLock(folder) if runs else None
    shown = invoke("show", "young", "--waits")
    assert shown.exit_code == 2
    assert "error: job young: its ranks have recorded no waits" in shown.stderr
    assert "every 20 optimizer steps, the first time after step 21" in shown.stderr
    assert ("until then `dsrun top young` shows who waits" in shown.stderr) == runs
    empty = json.loads(invoke("show", "young", "--waits", "--json").stdout)
    assert (empty["waits"], empty["waited_for"]) == (None, None)
    if lock is not None:
        lock.release()
