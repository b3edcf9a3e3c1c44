"""At a job's end the profile is one file, or a line says why it is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.profile_request import ProfileRequest
from dsrun.launcher.traces.job_end import conclude_profile
from support.rank_traces import BASE_S, a_step_label, read_trace, write_rank_trace

ASKED = ProfileRequest(first=3, last=4, ranks=None).to_env()


def records(folder: Path, *steps: int) -> None:
    lines = [{"event": "start", "time": 1.0}]
    lines += [
        {"event": "step", "time": 1.0, "step": n, "seconds": 1.0, "samples": 1, "lr": 1.0, "applied": True}
        for n in steps
    ]
    JobPaths(folder).records.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_job_that_was_not_profiled_has_nothing_to_say(tmp_path: Path) -> None:
    assert not list(conclude_profile(tmp_path, {}, range(2)))


def test_traces_are_merged_and_what_is_missing_is_said(tmp_path: Path) -> None:
    write_rank_trace(tmp_path, 0, [a_step_label(3, BASE_S + 9.0, 1.0)], steps=[3])
    drafts = JobPaths(tmp_path).trace_drafts(1)
    for draft in drafts:
        draft.write_text("half of one")
    missing, told = conclude_profile(tmp_path, ASKED, range(2))
    assert missing == "--profile: rank 1 left no trace"
    merged = JobPaths(tmp_path).merged_trace
    assert told == f"--profile: {merged} shows rank 0; `dsrun trace {tmp_path.name}` sums it up"
    assert read_trace(merged)["traceEvents"]
    assert not any(draft.exists() for draft in drafts)


def test_ranks_of_another_launcher_are_not_missed(tmp_path: Path) -> None:
    write_rank_trace(tmp_path, 2, [a_step_label(3, BASE_S + 9.0, 1.0)], steps=[3])
    (told,) = conclude_profile(tmp_path, ASKED, range(2, 3))
    assert "shows rank 2" in told


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (None, "the script has no engine of dsrun.initialize, whose steps are profiled"),
        ((), "the run ended after step 0, before steps 3 to 4"),
        ((1, 2), "the run ended after step 2, before steps 3 to 4"),
        ((1, 2, 3), "steps 3 to 4 did not end well, or were taken before the job was started again"),
    ],
)
def test_a_job_without_a_trace_says_why(tmp_path: Path, steps: tuple[int, ...] | None, reason: str) -> None:
    if steps is not None:
        records(tmp_path, *steps)
    assert list(conclude_profile(tmp_path, ASKED, range(2))) == [f"--profile: no rank has left a trace: {reason}"]


def test_a_damaged_trace_is_said_and_ends_nothing(tmp_path: Path) -> None:
    JobPaths(tmp_path).trace(0).write_bytes(b"half")
    missing, told = conclude_profile(tmp_path, ASKED, range(2))
    assert missing == "--profile: rank 1 left no trace"
    assert "the traces are not merged" in told
    assert "is no whole profile" in told


def test_a_large_trace_is_left_to_the_command(tmp_path: Path) -> None:
    JobPaths(tmp_path).trace(0).write_bytes(b"")
    os.truncate(JobPaths(tmp_path).trace(0), (8 << 20) + 1)
    (told,) = conclude_profile(tmp_path, ASKED, range(1))
    assert told == f"--profile: the traces of rank 0 are large; `dsrun trace {tmp_path.name}` merges them"
    assert not JobPaths(tmp_path).merged_trace.exists()


def test_events_that_lack_what_spans_have_do_not_end_the_launcher(tmp_path: Path) -> None:
    no_duration = {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 1.0}
    write_rank_trace(tmp_path, 0, [a_step_label(3, BASE_S + 9.0, 1.0), no_duration], steps=[3])
    (told,) = conclude_profile(tmp_path, ASKED, range(1))
    assert "shows rank 0" in told
    write_rank_trace(tmp_path, 0, [{"ts": 1.0, "name": "x"}], steps=[3])
    (told,) = conclude_profile(tmp_path, ASKED, range(1))
    assert "is no whole profile: KeyError" in told
