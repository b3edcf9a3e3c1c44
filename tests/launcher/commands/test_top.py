from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.launcher.dashboard.rank_table import RankUse, heading, row, table_of
from dsrun.launcher.jobs.listing import read_job
from dsrun.launcher.jobs.live_status import LiveRank, LiveStatus
from dsrun.launcher.jobs.lock import JobLock
from dsrun.launcher.machine.gpus.usage import GpuUse
from dsrun.launcher.protocol import RankStatus
from support.cli import invoke
from support.job_records import leave_job

LIVE = LiveRank(
    rank=3,
    host="w1",
    pid=42,
    seen_s=1.0,
    step=1200,
    phase="backward",
    collective="",
    idle_s=75.0,
    waited_s=0.0,
    cpu_percent=99.6,
    rss_bytes=3 << 30,
)


@pytest.mark.parametrize(
    ("gpu", "memory", "percent"),
    [
        (None, "-", "-"),
        (GpuUse(memory_bytes=None, percent=None), "-", "-"),
        (GpuUse(memory_bytes=40 << 30, percent=97), "40.0 GiB", "97%"),
    ],
)
def test_a_rank_is_a_line_and_what_is_not_known_a_dash(gpu: GpuUse | None, memory: str, percent: str) -> None:
    expected = ("3", "w1", "42", "100%", "3.0 GiB", memory, percent, "1200", "backward", "1m", "-")
    assert row(RankUse(live=LIVE, gpu=gpu)) == expected


def test_a_rank_shows_where_it_waits_longest_and_the_share_of_a_step() -> None:
    waits = replace(LIVE, longest_wait="reduce_scatter of unit 3", longest_wait_s=0.085, step_s=0.5)
    assert row(RankUse(live=waits, gpu=None))[-1] == "17% reduce_scatter of unit 3"


def test_of_a_pipeline_ranks_show_their_stage_and_bubble_and_the_heading_what_the_schedule_says(tmp_path: Path) -> None:
    stages = [
        replace(LIVE, stage=number, stages=2, schedule_wait=0.1111, stage_wait_s=0.0625, step_s=0.5 * number)
        for number in range(2)
    ]
    names, *rows = table_of([RankUse(live=one, gpu=None) for one in [*stages, LIVE]])
    assert names[-4:] == ("IDLE", "STAGE", "BUBBLE", "WAITS MOST IN")
    # The first one has not told how long a step takes, the last one nothing of stages.
    assert [cells[-3:] for cells in rows] == [("0/2", "-", "-"), ("1/2", "12%", "-"), ("-", "-", "-")]
    assert {len(cells) for cells in rows} == {len(names)}
    job = read_job(leave_job(tmp_path, "a"))
    assert job is not None
    assert heading(job, [RankUse(live=one, gpu=None) for one in stages]) == (
        "job a: crashed, dsrun -n 2 train.py; 2 stages, whose schedule has ranks wait 11% of a step"
    )


def test_ranks_show_their_coordinate_where_several_axes_divide_them() -> None:
    grid = [replace(LIVE, rank=rank, coordinate=f"data {rank}, tensor 0") for rank in range(2)]
    names, *rows = table_of([RankUse(live=one, gpu=None) for one in [*grid, LIVE]])
    assert names[:3] == ("RANK", "COORDINATE", "HOST")
    assert [cells[:3] for cells in rows] == [
        ("0", "data 0, tensor 0", "w1"),
        ("1", "data 1, tensor 0", "w1"),
        ("3", "-", "w1"),
    ]
    assert {len(cells) for cells in rows} == {len(names)}
    alone = [RankUse(live=replace(LIVE, coordinate="pipe 3"), gpu=None)]
    assert "COORDINATE" not in table_of(alone)[0], "the rank's number says it"


def test_top_of_what_is_no_terminal_prints_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert invoke("top").stderr == "dsrun: no job runs\n"
    folder = leave_job(tmp_path / "dsrun" / "jobs", "a")
    assert invoke("top", "a").stderr == "error: job a has ended: crashed\nhint: `dsrun show a`\n"
    lock = JobLock(folder)
    live = LiveStatus(folder, ["localhost"], clock=lambda: 1.0)
    live.started(0, 42)
    pulse = RankStatus(
        rank=0,
        beats=0,
        step=None,
        idle_s=None,
        waited_s=0.0,
        phase="",
        collective="all_gather",
        cpu_percent=0.0,
        rss_bytes=1 << 20,
        coordinate="tensor 0",
    )
    live.pulse([pulse])
    live.write()
    assert invoke("top").stdout == (
        "job a: running, dsrun -n 2 train.py\n"
        "RANK  HOST       PID  CPU  RSS      GPU MEM  GPU  STEP  PHASE       IDLE  WAITS MOST IN\n"
        "0     localhost  42   0%   1.0 MiB  -        -    -     all_gather  -     -\n"
    )
    value = json.loads(invoke("top", "last", "--json").stdout)
    assert [(job["id"], [rank["pid"] for rank in job["ranks"]]) for job in value["jobs"]] == [("a", [42])]
    (told,) = value["jobs"][0]["ranks"]
    assert told["coordinate"] == "tensor 0"
    assert [told[name] for name in ("stage", "stages", "schedule_wait", "stage_wait_s")] == [0, 0, 0.0, 0.0]
    lock.release()
