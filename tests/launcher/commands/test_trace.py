"""`dsrun trace` on profiles that ranks would have left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from support.cli import invoke
from support.job_records import leave_job
from support.rank_traces import BASE_S, a_span, a_step_label, read_trace, write_rank_trace

T = BASE_S + 1000.0
TABLE = """\
rank  step  seconds  CPU operations  GPU busy  waits
0     3     1.0000   0.3000          0.2500    0.1000
1     3     1.0000   0.3000          0.2500    0.1000

rank 0    on   calls  own seconds  share
aten::mm  cpu  1      0.3000       30.0%
gemm      gpu  1      0.2500       25.0%

rank 1    on   calls  own seconds  share
aten::mm  cpu  1      0.3000       30.0%
gemm      gpu  1      0.2500       25.0%
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return leave_job(tmp_path / "dsrun" / "jobs", "trained", outcome="done")


@pytest.fixture
def profiled(job: Path) -> Path:
    for rank in range(2):
        events = [
            a_step_label(3, T, 1.0),
            a_span("aten::mm", T + 0.1, 0.3),
            a_span("gemm", T + 0.2, 0.25, cat="kernel", tid=7),
            a_span("wait all_gather of unit 0", T + 0.6, 0.1, cat="user_annotation"),
        ]
        write_rank_trace(job, rank, events, steps=[3])
    return job


def test_the_merged_file_is_named_and_the_steps_are_summed_up(profiled: Path) -> None:
    shown = invoke("trace", "trained")
    assert (shown.exit_code, shown.stderr) == (0, "")
    merged = JobPaths(profiled).merged_trace
    assert shown.stdout == f"{merged}\n\n{TABLE}"
    assert len(read_trace(merged)["traceEvents"]) > 6


def test_json_has_the_figures_of_the_ranks_that_are_asked_for(profiled: Path, tmp_path: Path) -> None:
    output = tmp_path / "one.json.gz"
    body = json.loads(invoke("trace", "trained", "--ranks", "1", "-o", str(output), "--json").stdout)
    assert (body["trace"], [each["rank"] for each in body["ranks"]]) == (str(output), [1])
    assert body["ranks"][0]["steps"][0]["kernels_s"] == pytest.approx(0.25)
    assert output.exists()
    assert not JobPaths(profiled).merged_trace.exists()


def test_some_of_the_ranks_do_not_replace_the_file_of_all(profiled: Path) -> None:
    merged = JobPaths(profiled).merged_trace
    assert invoke("trace", "trained", "--ranks", "0,1").stdout.startswith(f"{merged}\n")
    of_all = merged.read_bytes()
    shown = invoke("trace", "trained", "--ranks", "1")
    assert shown.stdout.startswith(f"{profiled / 'trace-1.json.gz'}\n")
    assert merged.read_bytes() == of_all


def test_ranks_that_no_name_holds_ask_for_a_file(profiled: Path) -> None:
    for rank in range(3, 100, 2):
        JobPaths(profiled).trace(rank).touch()
    result = invoke("trace", "trained", "--ranks", ",".join(str(rank) for rank in range(3, 100, 2)))
    assert result.exit_code == 2
    assert "takes 49 ranks, too many for the name of a file\nhint: add `-o FILE`" in result.stderr


def test_a_job_without_a_profile_names_the_way_to_one(job: Path) -> None:
    result = invoke("trace", "trained")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: job trained has left no profile\nhint: `dsrun run --profile steps=10:13 ")


def test_a_rank_that_left_no_profile_is_named(profiled: Path) -> None:
    JobPaths(profiled).trace(1).unlink()
    result = invoke("trace", "trained", "--ranks", "0-1")
    assert (result.exit_code, result.stderr) == (2, "error: job trained has no profile of rank 1; there are 0\n")


def test_a_damaged_profile_is_said_and_the_others_are_shown(profiled: Path) -> None:
    JobPaths(profiled).trace(0).write_bytes(b"half")
    result = invoke("trace", "trained")
    assert result.exit_code == 1
    assert "rank0.trace.json.gz is no whole profile" in result.stderr
    assert "\n1     3     1.0000" in result.stdout


def test_where_nothing_can_be_written_no_half_file_is_left(profiled: Path, tmp_path: Path) -> None:
    result = invoke("trace", "trained", "-o", str(tmp_path / "gone" / "x.json.gz"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: the profiles of job trained are not merged: ")
    assert sorted(path.name for path in profiled.iterdir() if "trace" in path.name) == [
        "rank0.trace.json.gz",
        "rank1.trace.json.gz",
    ]


def test_a_device_or_a_pipe_is_not_replaced_by_the_merged_file(profiled: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = invoke("trace", "trained", "-o", str(tmp_path / "pipe"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: the profiles of job trained are not merged: {tmp_path}/pipe: it is a fifo (named pipe); expected a "
        "regular file\n"
    )
    assert (tmp_path / "pipe").is_fifo()
