from __future__ import annotations

import json
from pathlib import Path

from dsrun.contract import RECORDS_FILE
from dsrun.launcher.job_progress import last_step, was_asked_to_stop
from dsrun.launcher.live_status import LiveStatus
from dsrun.launcher.protocol import RankPulse


def record(folder: Path, *lines: str) -> None:
    with (folder / RECORDS_FILE).open("a") as file:
        file.writelines(lines)


def pulse(rank: int, step: int | None) -> RankPulse:
    return RankPulse(
        rank=rank,
        beats=1,
        step=step,
        idle_s=0.0,
        waited_s=0.0,
        phase="",
        collective="",
        cpu_percent=0.0,
        rss_bytes=1,
    )


def test_a_job_that_tells_nothing_has_no_step(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None


def test_the_last_recorded_step_counts_and_no_other_event(tmp_path: Path) -> None:
    steps = [json.dumps({"event": "step", "time": 1.0, "step": step, "pad": "x" * 5000}) + "\n" for step in range(40)]
    record(tmp_path, *steps, '{"event": "save", "step": 99}\n', '{"event": "step", "st')
    assert last_step(tmp_path) == 39


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    record(tmp_path, '{"event": "step", "step": 7}\n', '["step"]\n', '{"event": "step", "step": null}\n', "\0\n")
    assert last_step(tmp_path) == 7


def test_ranks_that_beat_tell_too(tmp_path: Path) -> None:
    live = LiveStatus(tmp_path, ["here", "here"], clock=lambda: 1.0)
    live.pulse([pulse(0, 4), pulse(1, None)])
    live.write()
    assert last_step(tmp_path) == 4
    record(tmp_path, '{"event": "step", "step": 5}\n')
    assert last_step(tmp_path) == 5


def test_a_wish_to_stop_is_told_from_a_stop_after_a_failure(tmp_path: Path) -> None:
    assert not was_asked_to_stop(tmp_path)
    events = tmp_path / "events.jsonl"
    events.write_text('{"event": "stop", "why": "rank 1 on a exited with code 3", "signal": "SIGTERM"}\n{"event": "st')
    assert not was_asked_to_stop(tmp_path)
    events.write_text(events.read_text() + 'op", "why": "SIGTERM", "signal": "SIGTERM"}\n')
    assert was_asked_to_stop(tmp_path)
