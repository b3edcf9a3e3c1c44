"""Steps that are asked for are traced whole, others are left alone, and no fault of a trace touches the run."""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler import profile

from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.profile_request import ProfileRequest
from dsrun.runtime.compat import profiler_runs
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.wait_times import WaitTimes
from dsrun.runtime.observe.trace import StepTrace, wanted_trace
from dsrun.runtime.trace_labels import labelled
from support.rank_traces import read_trace

CPU = torch.device("cpu")


@pytest.fixture
def waits() -> WaitTimes:
    return WaitTimes(HeartbeatWriter(None))


@pytest.fixture
def small_files() -> Generator[None]:
    """A disk that takes four KiB of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_steps(trace: StepTrace, waits: WaitTimes, count: int) -> None:
    for step in range(1, count + 1):
        with labelled("forward"):
            torch.ones(3).add(step)
        waits.enter("all_gather of unit 0", WaitKind.THREAD)
        waits.leave(0.001)
        trace.end_step(step)


def labels(path: Path) -> list[str]:
    return [event["name"] for event in read_trace(path)["traceEvents"] if event.get("cat") == "user_annotation"]


@pytest.mark.parametrize(("first", "last"), [(1, 2), (3, 3), (2, 5)])
def test_whole_steps_are_traced_with_our_labels_and_no_others(
    first: int, last: int, tmp_path: Path, waits: WaitTimes
) -> None:
    heartbeat = waits.heartbeat
    asked = ProfileRequest(first=first, last=last)
    trace = StepTrace(asked, rank=3, folder=tmp_path, device=CPU, waits=waits)
    run_steps(trace, waits, 5)
    assert waits.heartbeat is heartbeat
    assert not profiler_runs()
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.trace.json.gz"]
    assert JobPaths(tmp_path).trace(3).stat().st_mode & 0o777 == 0o600
    assert labels(JobPaths(tmp_path).trace(3)) == [
        label for step in range(first, last + 1) for label in (f"step {step}", "forward", "wait all_gather of unit 0")
    ]


def test_a_run_that_ends_within_the_steps_leaves_those_that_are_whole(tmp_path: Path, waits: WaitTimes) -> None:
    trace = StepTrace(ProfileRequest(first=2, last=9), rank=0, folder=tmp_path, device=CPU, waits=waits)
    run_steps(trace, waits, 3)
    trace.close()
    trace.close()
    body = read_trace(JobPaths(tmp_path).trace(0))
    assert body["dsrun"]["rank"] == 0
    assert body["dsrun"]["steps"] == [2, 3]


def test_a_run_that_goes_on_behind_the_steps_traces_none(tmp_path: Path, waits: WaitTimes) -> None:
    trace = StepTrace(ProfileRequest(first=2, last=3), rank=0, folder=tmp_path, device=CPU, waits=waits)
    trace.end_step(7)
    trace.end_step(1)
    assert not profiler_runs()
    trace.close()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_leaves_no_half_trace_and_lets_the_run_go_on(
    tmp_path: Path, waits: WaitTimes, small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = StepTrace(ProfileRequest(first=1, last=1), rank=0, folder=tmp_path, device=CPU, waits=waits)
    run_steps(trace, waits, 2)
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr().out
    assert said.startswith("dsrun: --profile: rank 0: the trace of step 1 was not written: ")
    assert "a part of it only" in said
    assert said.endswith("; the run goes on\n")


def test_a_folder_that_is_gone_is_said(tmp_path: Path, waits: WaitTimes, capsys: pytest.CaptureFixture[str]) -> None:
    trace = StepTrace(ProfileRequest(first=1, last=1), rank=0, folder=tmp_path / "gone", device=CPU, waits=waits)
    run_steps(trace, waits, 1)
    assert "the trace of step 1 was not written: no such file or directory" in capsys.readouterr().out


def test_a_profiler_of_the_script_goes_first(
    tmp_path: Path, waits: WaitTimes, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = StepTrace(ProfileRequest(first=2, last=3), rank=0, folder=tmp_path, device=CPU, waits=waits)
    with profile(use_kineto=True):
        run_steps(trace, waits, 3)
    assert "steps 2 to 3 cannot be traced: another profiler runs already; the run goes on" in capsys.readouterr().out


def test_ranks_that_are_not_asked_trace_nothing_and_what_they_start_is_not_asked_either(
    tmp_path: Path, waits: WaitTimes
) -> None:
    asked = {"DSRUN_RUN_DIR": os.fspath(tmp_path), **ProfileRequest(first=3, last=4, ranks=(1,)).to_env()}
    environ = dict(asked)
    assert wanted_trace(rank=0, device=CPU, waits=waits, environ=environ) is None
    assert environ == {"DSRUN_RUN_DIR": os.fspath(tmp_path)}
    environ = dict(asked)
    assert wanted_trace(rank=1, device=CPU, waits=waits, environ=environ) is not None
    assert wanted_trace(rank=1, device=CPU, waits=waits, environ=environ) is None


def test_outside_of_a_profile_a_label_is_none() -> None:
    assert labelled("a") is labelled("b")
