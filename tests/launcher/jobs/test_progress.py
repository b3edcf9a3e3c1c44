from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.jobs.live_status import LiveStatus
from dsrun.launcher.jobs.progress import Activity, doing_now, last_step, was_asked_to_stop
from dsrun.launcher.protocol import RankStatus


def record(folder: Path, *lines: str) -> None:
    with JobPaths(folder).records.open("a") as file:
        file.writelines(lines)


def pulse(rank: int, step: int | None) -> RankStatus:
    return RankStatus(
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


WAITS = {"event": "waiting", "text": "waiting for 2 GPUs: GPUs 0, 1 are held by a-job"}
START = {"event": "start", "attempt": 0}
RANKS = [{"event": "rank_started", "rank": rank} for rank in range(2)]
EXIT = {"event": "rank_exit", "rank": 1, "status": 1}
RESTART = {"event": "restart", "attempt": 1, "wait_s": 4.0}
STOP = {"event": "stop", "why": "SIGTERM", "signal": "SIGTERM"}
FAILED = {"event": "stop", "why": "rank 1 on a exited with code 3", "signal": "SIGTERM"}


@pytest.mark.parametrize(
    ("events", "printed", "doing"),
    [
        ([], "", Activity("being prepared", is_before_start=True)),
        ([WAITS], "", Activity("waiting for 2 GPUs: GPUs 0, 1 are held by a-job", is_before_start=True)),
        (
            [WAITS, {"event": "waiting", "text": "reaching 2 hosts"}],
            "",
            Activity("reaching 2 hosts", is_before_start=True),
        ),
        ([WAITS, START], "", Activity("its ranks are being started", is_before_start=True)),
        ([WAITS, START, *RANKS], "", Activity("2 ranks run and nothing was printed yet", is_before_start=False)),
        ([START, *RANKS], "hello", Activity("2 ranks run", is_before_start=False)),
        ([START, *RANKS, EXIT], "hello", Activity("1 rank runs", is_before_start=False)),
        ([START, *RANKS, EXIT, EXIT], "hello", Activity("its ranks have ended", is_before_start=False)),
        (
            [START, *RANKS, EXIT, EXIT, RESTART],
            "hello",
            Activity("waiting 4.0s before it is started again", is_before_start=False),
        ),
        ([START, *RANKS, EXIT, EXIT, RESTART, START, *RANKS], "hello", Activity("2 ranks run", is_before_start=False)),
        ([START, *RANKS, STOP], "hello", Activity("being stopped", is_before_start=False)),
        (
            [START, *RANKS, EXIT, FAILED, EXIT, RESTART],
            "hello",
            Activity("waiting 4.0s before it is started again", is_before_start=False),
        ),
        (
            [START, *RANKS, EXIT, FAILED, EXIT, RESTART, START, *RANKS],
            "hello",
            Activity("2 ranks run", is_before_start=False),
        ),
    ],
)
def test_what_a_job_does_is_known_from_its_events(
    tmp_path: Path, events: list[dict[str, Any]], printed: str, doing: Activity
) -> None:
    JobPaths(tmp_path).events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (tmp_path / "rank0.log").write_text(printed)
    assert doing_now(tmp_path) == doing
