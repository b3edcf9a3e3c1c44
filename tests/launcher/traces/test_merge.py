"""Ranks become processes of one file, their times those of the launcher's clock, and its events stand beside them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import InputError
from dsrun.launcher.traces.merge import MergedTrace, read_job_times
from dsrun.launcher.traces.rank_trace import read_rank_trace, traced_ranks
from support.rank_traces import BASE_S, a_span, a_step_label, read_trace, write_rank_trace

T = BASE_S + 1000.5


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    flow = {"ph": "s", "id": 1, "pid": 4711, "tid": 4712, "ts": 1.0, "cat": "fwdbwd", "name": "fwdbwd"}
    kernel = a_span("gemm", T + 0.1, 0.1, cat="kernel", tid=7) | {"pid": 0}
    write_rank_trace(tmp_path, 0, [a_step_label(2, T, 0.25), flow], steps=[2])
    # The clock of the other host is two seconds late.
    write_rank_trace(tmp_path, 1, [a_step_label(2, T - 2, 0.25), flow, kernel], steps=[2], host="other")
    paths = JobPaths(tmp_path)
    write_lines(
        paths.events,
        [
            {"event": "start", "time": T - 5000, "attempt": 0},
            {"event": "clock", "time": T - 90, "host": "w1", "offset_s": 2.0},
            {"event": "rank_started", "time": T - 80, "rank": 0, "host": "w0", "pid": 1},
            {"event": "rank_started", "time": T - 80, "rank": 1, "host": "w1", "pid": 2},
            {"event": "straggler", "time": T + 0.05, "rank": 1, "ratio": 1.4},
            {"event": "rank_exit", "time": T + 5, "rank": 0, "host": "w0", "status": 0},
        ],
    )
    write_lines(
        paths.records,
        [
            {"event": "step", "time": T + 0.25, "step": 2, "seconds": 0.25},
            {"event": "checkpoint", "time": T + 1.25, "step": 2, "seconds": 1.0, "path": "x"},
            {"event": "step", "time": T + 90_000.0, "step": 999, "seconds": 0.25},
        ],
    )
    return tmp_path


def merge(folder: Path) -> tuple[list[dict[str, Any]], int]:
    path = JobPaths(folder).merged_trace
    with MergedTrace(path, read_job_times(folder)) as merged:
        for rank in traced_ranks(folder):
            merged.add(read_rank_trace(folder, rank))
    body = read_trace(path)
    begin_us = body["baseTimeNanoseconds"] // 1000
    return [event | {"at_s": (begin_us + event.get("ts", 0)) / 1e6} for event in body["traceEvents"]], merged.left_out


def test_each_rank_is_one_process_named_with_the_launchers_name_of_its_host(job: Path) -> None:
    events, _ = merge(job)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "launcher", 1: "rank 0 (w0)", 2: "rank 1 (w1)"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == [0, 1, 2]
    assert {event["pid"] for event in events} == {0, 1, 2}


def test_threads_and_streams_of_a_rank_have_rows_of_their_own(job: Path) -> None:
    events, _ = merge(job)
    (kernel,) = [event for event in events if event.get("cat") == "kernel"]
    (label,) = [event for event in events if event.get("cat") == "user_annotation" and event["pid"] == 2]
    assert kernel["pid"] == label["pid"]
    assert kernel["tid"] != label["tid"]


def test_flows_of_different_ranks_are_not_joined(job: Path) -> None:
    events, _ = merge(job)
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2


def test_times_are_on_the_launchers_clock(job: Path) -> None:
    events, _ = merge(job)
    steps = [event for event in events if event["name"] == "step 2"]
    # Both ranks, and the record of rank 0.
    assert [round(event["at_s"] - T, 3) for event in steps] == [0.0, 0.0, 0.0]
    assert [event["dur"] for event in steps] == [pytest.approx(250_000.0)] * 3
    (checkpoint,) = [event for event in events if event["name"].startswith("checkpoint ")]
    assert round(checkpoint["at_s"] - T, 3) == 0.25


def test_events_of_the_launcher_stand_in_order_and_those_far_away_are_left_out(job: Path) -> None:
    events, left_out = merge(job)
    told = [(round(event["at_s"] - T, 3), event["name"]) for event in events if event["ph"] == "i"]
    assert told == [
        (-80.0, "rank 0 starts"),
        (-80.0, "rank 1 starts"),
        (0.05, "rank 1 takes 1.4 times as long"),
        (5.0, "rank 0 ends with 0"),
    ]
    assert left_out == 2


@pytest.mark.parametrize(
    "data",
    [b"", b"\x1f\x8b\x08\x00", gzip.compress(b"{"), gzip.compress(b"[]")],
    ids=["empty", "torn", "half an object", "a list"],  # the bytes have the time in them
)
def test_a_damaged_profile_is_named_and_leaves_no_merged_file(job: Path, data: bytes) -> None:
    JobPaths(job).trace(1).write_bytes(data)
    with pytest.raises(InputError, match=r"rank1\.trace\.json\.gz is no whole profile"):
        merge(job)
    assert not JobPaths(job).merged_trace.exists()
    assert not list(job.glob(".*"))
