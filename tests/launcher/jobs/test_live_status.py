"""live.json is whole at every moment, written once a second at most, and read by older and newer versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.jobs.live_status import LiveRank, LiveStatus, read_live
from dsrun.launcher.protocol import RankStatus


def pulse(rank: int, step: int | None = None) -> RankStatus:
    return RankStatus(
        rank=rank,
        beats=1,
        step=step,
        idle_s=None,
        waited_s=2.0,
        phase="forward",
        collective="all_gather of unit 3",
        cpu_percent=50.0,
        rss_bytes=1 << 30,
        longest_wait="reduce_scatter of unit 3",
        longest_wait_s=0.1,
        step_s=0.5,
        stage=1,
        stages=2,
        schedule_wait=0.1111,
        stage_wait_s=0.125,
    )


def steps(folder: Path) -> list[int | None]:
    live = read_live(folder)
    return [] if live is None else [rank.step for rank in live.ranks]


def test_every_field_comes_back(tmp_path: Path) -> None:
    status = LiveStatus(tmp_path, ["w0", "w1"], clock=lambda: 100.0)
    status.started(1, 4321)
    status.pulse([pulse(1, 7), pulse(0)])
    status.write()
    live = read_live(tmp_path)
    assert live is not None
    assert live.time_s == 100.0
    assert [rank.rank for rank in live.ranks] == [0, 1]
    assert live.ranks[1] == LiveRank(
        rank=1,
        host="w1",
        pid=4321,
        seen_s=100.0,
        step=7,
        phase="forward",
        collective="all_gather of unit 3",
        idle_s=None,
        waited_s=2.0,
        cpu_percent=50.0,
        rss_bytes=1 << 30,
        longest_wait="reduce_scatter of unit 3",
        longest_wait_s=0.1,
        step_s=0.5,
        stage=1,
        stages=2,
        schedule_wait=0.1111,
        stage_wait_s=0.125,
    )
    assert JobPaths(tmp_path).live.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["live.json"]


def test_pulses_of_many_hosts_cost_one_write_a_second(tmp_path: Path) -> None:
    status = LiveStatus(tmp_path, ["w0", "w1"], clock=lambda: 0.0)
    assert status.tick(50.0) is None
    status.pulse([pulse(0, 1)])
    assert status.tick(50.0) is None
    status.pulse([pulse(0, 2)])
    status.pulse([pulse(1, 2)])
    assert status.tick(50.9) == 51.0
    assert steps(tmp_path) == [1]
    assert status.tick(51.0) is None
    assert steps(tmp_path) == [2, 2]


def test_a_rank_that_ended_is_gone(tmp_path: Path) -> None:
    status = LiveStatus(tmp_path, ["w0", "w0"], clock=lambda: 0.0)
    status.pulse([pulse(0, 1), pulse(1, 2)])
    status.ended(0)
    status.tick(1.0)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"time": 1}', '{"time": 1, "ranks": [{"rank": 0}]}'])
def test_what_is_no_live_file_reads_as_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        JobPaths(tmp_path).live.write_text(content)
    assert read_live(tmp_path) is None


def test_fields_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    status = LiveStatus(tmp_path, ["w0"], clock=lambda: 0.0)
    status.pulse([pulse(0, 5)])
    status.write()
    body = json.loads(JobPaths(tmp_path).live.read_text())
    body["ranks"][0]["gpu"] = 3
    JobPaths(tmp_path).live.write_text(json.dumps(body))
    assert steps(tmp_path) == [5]


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    status = LiveStatus(tmp_path / "gone", ["w0"], clock=lambda: 0.0)
    status.pulse([pulse(0)])
    assert status.tick(1.0) is None
