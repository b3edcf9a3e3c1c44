from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.dashboard.page import page_rows
from dsrun.launcher.dashboard.run_view import RunView, RunWatcher
from dsrun.launcher.jobs.listing import read_job
from dsrun.launcher.machine.gpus.usage import GpuNow
from support.recorded_runs import BEGIN_S, a_step, append_records, log_line, run_lines, start_line, step_line
from support.watched_jobs import JOB_ID, leave_files, leave_ranks, running_job

HOSTS = ("w1", "w1", "w2", "w2")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder of a job that runs and has written nothing yet."""
    with running_job(tmp_path) as folder:
        yield folder


def view_of(folder: Path, *, now_s: float = BEGIN_S + 30) -> RunView:
    job = read_job(folder)
    assert job is not None
    watcher = RunWatcher(job, HOSTS, with_gpus=False)
    watcher.look()
    return watcher.view(now_s=now_s)


def drawn(view: RunView, *, columns: int = 80, lines: int = 24, **options: Any) -> list[str]:
    rows = [row.plain for row in page_rows(view, columns=columns, lines=lines, **options)]
    assert len(rows) <= lines
    assert max(map(len, rows)) <= columns
    return rows


def row_of(rows: Sequence[str], label: str) -> str:
    """The row with this label, without it."""
    (found,) = [row for row in rows if row.startswith(f"{label} ")]
    return found.removeprefix(label).strip()


def leave_whole_run(folder: Path) -> None:
    last = a_step(400, total_steps=10_000, mfu=0.42, hfu=0.5, pipeline_wait_s=0.001)
    records = [*run_lines(range(1, 400)), log_line({"reward": 0.5, "kl": None}, step=390), step_line(last)]
    events = [("restart", {"attempt": 1, "wait_s": 5.0, "why": "rank 3 was killed by SIGKILL"})]
    leave_files(folder, records=records, events=events, gpu_bytes=20 << 30, host_bytes=64 << 30)
    leave_ranks(folder, HOSTS, idle_s={3: 41.0})


def test_one_page_of_80_by_24_has_the_whole_story(folder: Path) -> None:
    leave_whole_run(folder)
    rows = drawn(view_of(folder), keys="q leaves")
    assert len(rows) == 24
    assert rows[0].startswith(f"{JOB_ID}  running  step 400/10,000 4%  ETA 8m  ran ")
    assert row_of(rows, "loss") == "2  smoothed 2  level"
    curve = [row for row in rows if "│" in row[:10]]
    assert len(curve) >= 5
    assert any(0x2800 < ord(character) < 0x2900 for row in curve for character in row)
    assert row_of(rows, "update") == "lr 0.0003  norm 1.5  0 steps skipped"
    assert row_of(rows, "speed").startswith("50 ms a step  328K tokens/s, 81.9K a rank")
    assert row_of(rows, "compute") == "12 TFLOP/s of the model, MFU 42.0%  with recomputation 15, HFU 50.0%"
    assert "│    forward 28%    │" in row_of(rows, "step")
    assert "data 4%  script 2%  step 10%  8% waiting for ranks, 2% for stages" in "\n".join(rows)
    assert row_of(rows, "memory").endswith("12% of 20.0 GiB, 2.4 GiB on rank 1")
    assert row_of(rows, "slow") == "rank 3 on w2  no progress for 41s, in forward"
    assert "rank 2 on w2  +5 ms a step, 1.11 x the others" in "\n".join(rows)
    assert row_of(rows, "saved") == "step350, 12s ago, 1.0 GiB in 800 ms"
    assert row_of(rows, "script") == "kl not finite  reward 0.5"
    assert row_of(rows, "event").endswith("restart 1, 5.0s after: rank 3 was killed by SIGKILL")
    assert rows[-1] == "q leaves"


@pytest.mark.parametrize(("columns", "lines"), [(20, 3), (40, 10), (79, 12), (80, 24), (119, 50), (250, 70), (9, 1)])
def test_a_page_fits_a_terminal_of_any_size(folder: Path, columns: int, lines: int) -> None:
    leave_whole_run(folder)
    view = view_of(folder)
    for log in (None, [], ["[0] a line of the log " * 9] * 30):
        drawn(view, columns=columns, lines=lines, log=log, keys="q leaves")


def test_a_small_terminal_has_the_head_the_loss_and_what_matters_most(folder: Path) -> None:
    leave_whole_run(folder)
    rows = drawn(view_of(folder), lines=9)
    assert rows[0].startswith(JOB_ID)
    assert row_of(rows, "loss")
    assert row_of(rows, "speed")
    assert not [row for row in rows if row.startswith(("script", "saved"))]


def test_a_large_terminal_has_the_rate_beside_the_loss_and_every_rank(folder: Path) -> None:
    leave_whole_run(folder)
    rows = drawn(view_of(folder), columns=140, lines=50)
    assert any("tokens/s │" in row for row in rows)
    assert [row.split()[:2] for row in rows[-4:]] == [[str(rank), host] for rank, host in enumerate(HOSTS)]


def test_lines_of_the_log_take_their_place_from_the_curve(folder: Path) -> None:
    leave_whole_run(folder)
    view = view_of(folder)
    rows = drawn(view, log=[f"[0] line {number}" for number in range(100)])
    assert rows[-8:] == [f"[0] line {number}" for number in range(92, 100)]
    assert "no line in the log yet" in drawn(view, log=[])


def test_only_what_is_known_is_told(folder: Path) -> None:
    bare = {"event": "step", "time": BEGIN_S, "step": 1, "seconds": 0.5, "samples": 4, "lr": 0.1, "applied": True}
    append_records(folder, [bare, {**bare, "step": 2, "samples": 8}])
    rows = drawn(view_of(folder))
    assert row_of(rows, "loss") == "not known"
    assert row_of(rows, "speed").startswith("500 ms a step  8 samples/s")
    assert not [
        row for row in rows if row.startswith(("compute", "memory", "slow", "saved", "script", "event", "step"))
    ]
    assert "None" not in "\n".join(rows)


def test_what_is_not_finite_is_told_so(folder: Path) -> None:
    steps = [
        *map(a_step, range(1, 120)),
        a_step(120, loss=None, grad_norm=None, applied=False, loss_scale=1024.0, non_finite="head.weight"),
    ]
    append_records(folder, map(step_line, steps))
    rows = drawn(view_of(folder), columns=100)
    assert row_of(rows, "loss").startswith("not finite  smoothed ")
    assert "falling" not in row_of(rows, "loss"), "of what is lost nobody knows where it goes"
    assert row_of(rows, "update") == ("lr 0.0003  gradient of head.weight not finite  loss scale 1024  1 step skipped")


def test_a_job_without_steps_shows_its_ranks_and_says_why_there_is_no_curve(folder: Path) -> None:
    leave_ranks(folder, HOSTS)
    rows = drawn(view_of(folder))
    assert rows[1] == "dsrun -n 2 train.py"
    assert rows[2:4] == ["being prepared", "no curve: only a script that calls dsrun.initialize records its steps"]
    assert [row.split()[1] for row in rows[-4:]] == list(HOSTS)
    append_records(folder, [start_line()])
    assert "no curve yet: the engine has started and has taken no step" in drawn(view_of(folder))


def test_gpus_of_this_machine_are_a_row(folder: Path) -> None:
    leave_whole_run(folder)
    job = read_job(folder)
    assert job is not None
    watcher = RunWatcher(job, HOSTS, with_gpus=False)
    watcher.look()
    view = watcher.view(now_s=BEGIN_S)
    gpus = [
        GpuNow(index=0, percent=97, memory_used_bytes=40 << 30, memory_total_bytes=80 << 30),
        GpuNow(index=1, percent=None, memory_used_bytes=None, memory_total_bytes=None),
    ]
    assert row_of(drawn(replace(view, gpus=gpus), lines=30), "gpus") == "0: 97% 40.0G  1:"


def test_names_that_a_script_made_up_move_no_cursor(folder: Path) -> None:
    records = [step_line(a_step(1, non_finite="a\x1b[2Jb")), log_line({"x\x1b]0;title\x07y\n": 1.0}, step=1)]
    leave_files(folder, records=records, events=[("kill", {"why": "a\rb\x1b[H"})])
    text = "".join(drawn(view_of(folder)))
    assert text.isprintable()


def test_a_terminal_without_unicode_gets_ascii(folder: Path) -> None:
    leave_whole_run(folder)
    assert all(row.isascii() for row in drawn(view_of(folder), ascii_only=True, columns=70))


def test_records_that_were_passed_over_are_told(folder: Path) -> None:
    append_records(folder, [*run_lines(range(1, 5)), {"event": "step", "step": 5}])
    assert "1 records damaged or of another version" in drawn(view_of(folder), columns=120)[0]


def test_of_records_that_are_still_read_the_page_says_how_many(folder: Path) -> None:
    leave_whole_run(folder)
    job = read_job(folder)
    assert job is not None
    watcher = RunWatcher(job, HOSTS, with_gpus=False)
    watcher.look(budget_s=0.0)
    assert "% of its records read" in drawn(watcher.view(), columns=120)[0]
    assert JobPaths(folder).records.exists()
