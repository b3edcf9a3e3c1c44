from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.commands._follow_log import hosts_by_rank, parse_since
from dsrun.launcher.jobs.listing import read_job
from support.job_records import leave_job

NOW = datetime(2026, 11, 21, 15, 30, 20, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("30", NOW - timedelta(seconds=30)),
        ("5m", NOW - timedelta(minutes=5)),
        ("2h", NOW - timedelta(hours=2)),
        ("14:30", NOW.replace(hour=14, minute=30, second=0)),
        ("9:05:07", NOW.replace(hour=9, minute=5, second=7)),
        ("2026-11-20", datetime(2026, 11, 20, tzinfo=NOW.tzinfo)),
        ("2026-11-20T14:30", datetime(2026, 11, 20, 14, 30, tzinfo=NOW.tzinfo)),
        ("2026-11-20T14:30+00:00", datetime(2026, 11, 20, 14, 30, tzinfo=timezone.utc)),
    ],
)
def test_since_is_a_time_ago_or_a_time(text: str, moment: datetime) -> None:
    assert parse_since(text, NOW) == moment.timestamp()


@pytest.mark.parametrize("text", ["", "soon", "25:00", "-5m", "2026-13-01"])
def test_what_is_neither_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="expected a time ago or a time") as raised:
        parse_since(text, NOW)
    assert raised.value.hint == "`5m`, `2h`, `14:30` or `2026-11-21T14:30`"


def test_every_rank_has_its_host_also_where_the_plan_has_another_form(tmp_path: Path) -> None:
    job = read_job(leave_job(tmp_path, "a"))
    assert job is not None
    assert hosts_by_rank(job) == ["localhost", "localhost"]
    old = read_job(leave_job(tmp_path, "b", plan={}))
    assert old is not None
    assert hosts_by_rank(old) == ["localhost", "localhost"]
