from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.console.status_area import cells
from dsrun.launcher.jobs.listing import Job, read_job
from dsrun.launcher.jobs.record import read_json, write_json
from dsrun.launcher.jobs.text import command_text, job_json, job_table, short_command, short_duration, took_s
from support.job_records import NOW, leave_job


def job_of(folder: Path) -> Job:
    job = read_job(folder)
    assert job is not None
    return job


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3599, "59m"),
        (3660, "1h01m"),
        (86399, "23h59m"),
        (86400, "1d00h"),
        (200_000, "2d07h"),
    ],
)
def test_a_duration_fits_into_a_column(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("run", "-n", "2", "train.py", "a b"), "dsrun -n 2 train.py 'a b'"),
        (("-n", "2", "train.py"), "dsrun -n 2 train.py"),
    ],
)
def test_a_command_can_be_pasted_into_a_shell(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    assert command_text(job_of(leave_job(tmp_path, "a", command=words))) == text


def test_a_job_takes_as_long_as_is_known(tmp_path: Path) -> None:
    now = NOW + timedelta(hours=1)
    assert took_s(job_of(leave_job(tmp_path, "done", outcome="done")), now) == 119
    # Nobody saw the end of one, the other has not begun.
    assert took_s(job_of(leave_job(tmp_path, "crashed")), now) is None
    assert took_s(job_of(leave_job(tmp_path, "left", outcome="stopped", started=None)), now) is None
    ended = leave_job(tmp_path, "never", outcome="stopped")
    write_json(JobPaths(ended).outcome, {**(read_json(JobPaths(ended).outcome) or {}), "never_ran": True})
    assert took_s(job_of(ended), now) is None


def test_the_table_is_aligned_and_says_what_is_not_known(tmp_path: Path) -> None:
    jobs = [
        (job_of(leave_job(tmp_path, "20261121-0733-abcd", outcome="failed", exit_code=137)), 1200),
        (job_of(leave_job(tmp_path, "b")), None),
    ]
    assert job_table(jobs, now=NOW + timedelta(hours=2)) == [
        "JOB                 STATE    RANKS  STEP  AGE    TOOK  EXIT  COMMAND",
        "20261121-0733-abcd  failed   2      1200  2h00m  1m    137   dsrun -n 2 train.py",
        "b                   crashed  2      -     2h00m  -     -     dsrun -n 2 train.py",
    ]


HOSTFILE = "/home/ada/projects/llm/clusters/rack-7/hostfile"


@pytest.mark.parametrize(
    ("words", "target", "columns", "text"),
    [
        (("-n", "2", "train.py"), "train.py", 19, "dsrun -n 2 train.py"),
        (
            ("run", "-H", HOSTFILE, "train.py"),
            "train.py",
            60,
            "dsrun -H /home/ada/pr…lm/clusters/rack-7/hostfile train.py",
        ),
        (("run", "-H", HOSTFILE, "train.py"), "train.py", 40, "dsrun -H /home…ack-7/hostfile train.py"),
        (("run", "-H", HOSTFILE, "train.py", "--lr", "1"), "train.py", 19, "… train.py --lr 1"),
        (("run", "-H", HOSTFILE, "train.py", "--lr", "1"), "train.py", 14, "… train.py --…"),
        (("-n", "2", "-m", "lab.train", "--lr", "1"), "lab.train", 19, "… lab.train --lr 1"),
        (("--no-python", "/opt/envs/a/bin/python", "train.py"), "/opt/envs/a/bin/python", 19, "…/python train.py"),
        (("-n", "2", "my folder/a b.py", "--lr", "1"), "my folder/a b.py", 19, "…/'a b.py' --lr 1"),
        (("-n", "2", "run", "--lr", "1"), "./run", 19, "… run --lr 1"),
        # Each of these letters takes two columns.
        (("-n", "2", "訓練.py", "--lr", "1"), "訓練.py", 18, "… '訓練.py' --lr 1"),
        (("-n", "2", "訓練.py", "--lr", "1"), "訓練.py", 15, "… '訓練.py' --…"),
        (("-n", "2", "a\nb.py", "--lr", "1"), "a\nb.py", 40, "dsrun -n 2 'a\ufffdb.py' --lr 1"),
        # Of a record without a plan nobody knows which word is the script.
        (("-n", "2", "train.py", "--lr", "1"), None, 12, "dsrun -n 2 …"),
    ],
)
def test_a_narrow_command_still_shows_its_script(
    tmp_path: Path, words: tuple[str, ...], target: str | None, columns: int, text: str
) -> None:
    plan = {} if target is None else {"program": {"kind": "script", "target": target, "args": [], "python": "python"}}
    shown = short_command(job_of(leave_job(tmp_path, "a", command=words, plan=plan)), columns)
    assert (shown, cells(shown) <= columns) == (text, True)


@pytest.mark.parametrize(
    ("columns", "heading", "line"),
    [
        (
            200,
            "JOB                 STATE    RANKS  STEP  AGE    TOOK  EXIT  COMMAND",
            f"20261121-0733-abcd  stopped  2      1200  2h00m  1m    143   dsrun -H {HOSTFILE} train.py --lr 1",
        ),
        (
            80,
            "JOB                 STATE    RANKS  STEP  AGE    TOOK  EXIT  COMMAND",
            "20261121-0733-abcd  stopped  2      1200  2h00m  1m    143   … train.py --lr 1",
        ),
        (
            60,
            "JOB                 STATE    STEP  TOOK  COMMAND",
            "20261121-0733-abcd  stopped  1200  1m    … train.py --lr 1",
        ),
        (40, "JOB                 STATE    COMMAND", "20261121-0733-abcd  stopped  … train.py…"),
    ],
)
def test_a_narrow_table_does_without_columns_before_it_does_without_the_script(
    tmp_path: Path, columns: int, heading: str, line: str
) -> None:
    command = ("run", "-H", HOSTFILE, "train.py", "--lr", "1")
    job = job_of(leave_job(tmp_path, "20261121-0733-abcd", outcome="stopped", exit_code=143, command=command))
    assert job_table([(job, 1200)], now=NOW + timedelta(hours=2), columns=columns) == [heading, line]


def test_json_has_what_the_table_has_and_where_to_find_more(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "a", outcome="done")
    value = job_json(job_of(folder), step=3, now=NOW)
    assert {name: value[name] for name in ("id", "state", "ranks", "step", "exit_code", "duration_s", "folder")} == {
        "id": "a",
        "state": "done",
        "ranks": 2,
        "step": 3,
        "exit_code": 0,
        "duration_s": 119.0,
        "folder": str(folder),
    }
    assert (value["created"], value["ended"]) == ("2026-11-21T07:33:00.000+00:00", "2026-11-21T07:35:00.000+00:00")
