"""Records of runs that never were: files as rank 0 would have left them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.step_records import (
    LOG_EVENT,
    PHASES,
    SPREAD_EVENT,
    STEP_EVENT,
    LogRecord,
    SpreadRecord,
    StepRecord,
    StepSpread,
    log_fields,
    spread_fields,
    step_fields,
)
from dsrun.contract.wait_records import WAITS_EVENT, WaitRecord, WaitSpread, to_fields

#: When runs of tests began, seconds since the epoch.
BEGIN_S = 1_795_000_000.0
STEP_S = 0.05


def a_step(step: int, **changes: Any) -> StepRecord:
    """A step of a model that learns: loss, phases and rates that belong together."""
    values: dict[str, Any] = {
        "step": step,
        "time": BEGIN_S + STEP_S * step,
        "seconds": STEP_S,
        "samples": 16 * step,
        "lr": 3e-4,
        "applied": True,
        "loss": 2.0 + 4.0 * math.exp(-step / 40),
        "grad_norm": 1.5,
        "tokens": 16_384,
        "tokens_per_s": 16_384 / STEP_S,
        "model_tflops": 12.0,
        "hardware_tflops": 15.0,
        "memory_bytes": 3 << 30,
        "memory": {"gpu": 2 << 30, "cpu": 1 << 30},
        "phases": {"data": 0.002, "script": 0.001, "forward": 0.014, "backward": 0.028, "step": 0.005},
        "waits_s": 0.004,
        "traffic": {"data": 25_000_000},
    }
    return StepRecord(**(values | changes))


def a_spread(step: int, *, steps: int = 20, ranks: int = 4, slow_rank: int = 2) -> SpreadRecord:
    """What so many steps took on all ranks, of which one is slower than the others."""
    seconds = {
        name: StepSpread(least=(0.9 * s,) * steps, median=(s,) * steps, most=(1.3 * s,) * steps, most_rank=slow_rank)
        for name, s in zip((*PHASES[:5], "waits"), (0.002, 0.001, 0.014, 0.028, 0.005, 0.004), strict=True)
    }
    memory = {"gpu": StepSpread(least=(2e9,), median=(2.1e9,), most=(2.6e9,), most_rank=1)}
    return SpreadRecord(step=step, steps=steps, ranks=ranks, seconds=seconds, memory=memory)


def a_wait(step: int, *, steps: int = 20, ranks: int = 4, slow_rank: int = 2) -> WaitRecord:
    """Waits of all ranks in so many steps, of which one is waited for by the others."""
    waited_s = {rank: 0.001 if rank == slow_rank else 0.006 for rank in range(ranks)}
    total = WaitSpread(
        label="all", waits=12, least_s=0.001, median_s=0.006, most_s=0.006, least_rank=slow_rank, most_rank=0
    )
    row = WaitSpread(
        label="reduce_scatter of unit 3",
        waits=1,
        least_s=0.0005,
        median_s=0.004,
        most_s=0.004,
        least_rank=slow_rank,
        most_rank=0,
    )
    return WaitRecord(step=step, steps=steps, step_s=STEP_S, ranks=ranks, total=total, labels=(row,), waited_s=waited_s)


def start_line(*, time: float = BEGIN_S, ranks: int = 4) -> dict[str, Any]:
    """The record with which rank 0 of an attempt begins, without a description of the model."""
    return {"event": "start", "time": time, "script": "/home/ada/train.py", "world_size": ranks, "stage": 2}


def step_line(record: StepRecord) -> dict[str, Any]:
    """A step as the file has it."""
    return {"event": STEP_EVENT, "time": record.time, **step_fields(record)}


def log_line(values: Mapping[str, float | None], *, step: int) -> dict[str, Any]:
    """Figures of the script as the file has them."""
    time_s = BEGIN_S + STEP_S * step
    record = LogRecord(step=step, time=time_s, values=values, samples=16 * step)
    return {"event": LOG_EVENT, "time": time_s, **log_fields(record)}


def run_lines(steps: Sequence[int] | range, *, ranks: int = 4, first: bool = True) -> list[dict[str, Any]]:
    """An attempt: its start, its steps, comparisons of the ranks every 20 steps, a checkpoint every 50."""
    lines = [start_line(time=BEGIN_S + STEP_S * (steps[0] - 1), ranks=ranks)] if first else []
    for step in steps:
        time_s = BEGIN_S + STEP_S * step
        lines.append(step_line(a_step(step)))
        if step % 20 == 0:
            lines.append({"event": SPREAD_EVENT, "time": time_s, **spread_fields(a_spread(step, ranks=ranks))})
            lines.append({"event": WAITS_EVENT, "time": time_s, **to_fields(a_wait(step, ranks=ranks))})
        if step % 50 == 0:
            saved = {"path": f"/ckpt/step{step}", "tag": f"step{step}", "step": step, "seconds": 0.8, "bytes": 1 << 30}
            lines.append({"event": CHECKPOINT_EVENT, "time": time_s, **saved})
    return lines


def append_records(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends records to those of a job."""
    with JobPaths(folder).records.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
