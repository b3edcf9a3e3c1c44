"""Copies of memory are counted once for each byte, by one core and by all that may be used."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from dsrun.launcher.bench.figure import Figure
from dsrun.launcher.bench.memory import answer, huge_buffer, measure
from dsrun.launcher.machine.cgroup import read_limits
from dsrun.launcher.machine.proc_files import usable_cores

SMALL = 2 << 20


def test_one_core_and_all_cores_are_measured_and_no_thread_keeps_its_core() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    figures = measure(cpus, buffer_bytes=SMALL, repetition_s=0.01)
    cores = usable_cores(cpus, read_limits(Path("/")).quota_cores)
    expected = ["memory copy, one core", *([f"memory copy, {cores} cores"] if cores > 1 else [])]
    assert [one.name for one in figures] == expected
    # A byte a nanosecond is what the slowest machine of this century does; a terabyte a second, none.
    assert all(1e8 < one.low <= one.median <= one.high < 1e13 for one in figures)
    assert sorted(os.sched_getaffinity(0)) == cpus


def test_buffers_are_touched_before_they_are_measured() -> None:
    with huge_buffer(4 * 4096) as buffer:
        assert [buffer[at] for at in range(0, len(buffer), 4096)] == [1] * 4


def test_the_answer_is_plain_json() -> None:
    with ExitStack() as keep:
        assert Figure.from_json(answer({}, keep)[0]).unit == "B/s"
