from __future__ import annotations

import time
from pathlib import Path

from dsrun.launcher.dashboard.log_tail import LogTail
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.protocol import Output
from support.job_records import a_plan
from support.jobs import RecordingSink


def wait_for(tail: LogTail, text: str) -> list[str]:
    """Lines of the log once one has this text; fails after some seconds."""
    deadline_s = time.monotonic() + 10
    while not any(text in line for line in tail.lines()):
        assert time.monotonic() < deadline_s, tail.lines()
        time.sleep(0.02)
    return tail.lines()


def test_lines_come_as_ranks_write_them_with_their_rank_before_them(tmp_path: Path) -> None:
    output = JobOutput(a_plan(tmp_path), RecordingSink())
    try:
        with LogTail(tmp_path) as tail:
            output.take(Output(rank=0, stream="stdout", sequence=0, time_s=time.time(), text="first\n"))
            assert wait_for(tail, "first") == ["[0] first"]
            output.take(Output(rank=1, stream="stderr", sequence=0, time_s=time.time(), text="second\n"))
            assert wait_for(tail, "second") == ["[0] first", "[1] second"]
    finally:
        output.close()
