"""Profiles of ranks that never were, as Kineto would have written them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths

#: Kineto's times count from some moment that is far away.
BASE_S = 1_790_857_026
PID, THREAD = 4711, 4712


def a_span(name: str, begin_s: float, seconds: float, *, cat: str = "cpu_op", tid: Any = THREAD) -> dict[str, Any]:
    """A span that begins so many seconds after the epoch."""
    ts = (begin_s - BASE_S) * 1e6
    return {"ph": "X", "cat": cat, "name": name, "pid": PID, "tid": tid, "ts": ts, "dur": seconds * 1e6, "args": {}}


def a_step_label(step: int, begin_s: float, seconds: float) -> dict[str, Any]:
    """Our label of a step."""
    return a_span(f"step {step}", begin_s, seconds, cat="user_annotation")


def write_rank_trace(
    folder: Path, rank: int, events: Sequence[dict[str, Any]], *, steps: Sequence[int], host: str = "vm"
) -> None:
    """Writes a rank's profile with what Kineto puts around its events."""
    around: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": PID, "tid": THREAD, "ts": 1.0, "args": {"name": "thread 4712"}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 5.0},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 1.0, "dur": 9.0},
    ]
    body = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE_S * 10**9,
        "dsrun": {"rank": rank, "host": host, "steps": list(steps)},
        "traceEvents": [*around, *events],
        "traceName": "x",
    }
    JobPaths(folder).trace(rank).write_bytes(gzip.compress(json.dumps(body).encode()))


def read_trace(path: Path) -> dict[str, Any]:
    """Reads a profile, of a rank or merged."""
    return json.loads(gzip.decompress(path.read_bytes()))
