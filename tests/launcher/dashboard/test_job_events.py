from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.dashboard.job_events import JobEvents, event_text
from dsrun.launcher.jobs.record import event_line


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "restart", "attempt": 1, "wait_s": 5, "why": "rank 3 was killed"},
            "restart 1, 5.0s after: rank 3 was killed",
        ),
        (
            {"event": "straggler", "rank": 2, "ratio": 1.2},
            "rank 2 is steadily slower than the others: 1.20 x their own time a step",
        ),
        ({"event": "hang", "lines": ["error: no progress for 5s", "more"]}, "no progress for 5s"),
        ({"event": "host_lost", "host": "w1", "reason": "no answer"}, "host w1 was lost: no answer"),
        ({"event": "rank_exit", "rank": 1, "status": 3}, "rank 1 ended with exit code 3"),
        ({"event": "rank_exit", "rank": 1, "status": -9, "oom": True}, "rank 1 was ended by signal 9, out of memory"),
        ({"event": "rank_exit", "rank": 1, "status": 0}, None),
        ({"event": "restart"}, None),
        ({"event": "rank_started", "rank": 0}, None),
    ],
)
def test_what_a_person_should_see_is_a_line(event: dict[str, Any], text: str | None) -> None:
    assert event_text(event) == text


def test_events_are_read_as_they_come_and_restarts_are_counted(tmp_path: Path) -> None:
    events = JobEvents(tmp_path)
    assert not events.read()
    restart = {"attempt": 1, "wait_s": 0, "why": "it died"}
    path = JobPaths(tmp_path).events
    path.write_bytes(event_line("start", {}) + event_line("restart", restart))
    assert events.read()
    with path.open("ab") as file:
        file.write(event_line("restart", {**restart, "attempt": 2}))
    events.read()
    assert events.restarts == 2
    assert [event.text for event in events.recent] == [
        "restart 1, 0 ms after: it died",
        "restart 2, 0 ms after: it died",
    ]
