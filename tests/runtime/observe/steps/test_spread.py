"""What steps took on all ranks, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.contract.step_records import SPREAD_EVENT, read_spread
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.wait_times import WaitTimes
from dsrun.runtime.observe.steps.spread import SpreadOfSteps
from dsrun.runtime.observe.wait_report import STEPS_PER_RECORD, WaitReport
from support.written_records import RecordsAtOnce


def test_each_step_is_compared_over_the_ranks_with_the_exchange_of_waits(tmp_path: Path) -> None:
    path = tmp_path / "records"

    def body(axis: LoopbackCollectives) -> int:
        rank, records = axis.rank, RecordsAtOnce(path)
        spread = SpreadOfSteps(STEPS_PER_RECORD, records, memory=lambda: {"cpu": 1000 * (rank + 1)})
        report = WaitReport(
            WaitTimes(HeartbeatWriter(None)),
            axis,
            records,
            device=torch.device("cpu"),
            is_recorded=True,
            spread=spread,
        )
        for step in range(1, STEPS_PER_RECORD + 2):
            spread.end_step({"forward": step + rank / 10, "waits": 0.5 if rank == 1 else 0.0})
            report.end_step(step)
        return axis.traffic.calls["all_gather"]

    assert LoopbackWorld(3).run(body) == [1, 1, 1], "one all-gather for both"
    (line,) = [json.loads(line) for line in path.read_text().splitlines() if SPREAD_EVENT in line]
    record = read_spread(line)
    assert (record.step, record.steps, record.ranks) == (STEPS_PER_RECORD + 1, STEPS_PER_RECORD, 3)
    assert record.seconds.keys() == {"forward", "waits"}, "of what nobody has, nothing is told"
    forward, waits = record.seconds["forward"], record.seconds["waits"]
    assert forward.least == tuple(float(step) for step in range(2, STEPS_PER_RECORD + 2)), "the first step is left out"
    assert forward.median == tuple(step + 0.1 for step in range(2, STEPS_PER_RECORD + 2))
    assert forward.most == tuple(step + 0.2 for step in range(2, STEPS_PER_RECORD + 2))
    assert (forward.most_rank, waits.most_rank) == (2, 1)
    assert (waits.least[0], waits.median[0], waits.most[0]) == (0.0, 0.0, 0.5)
    memory = record.memory["cpu"]
    assert (memory.least, memory.median, memory.most, memory.most_rank) == ((1000.0,), (2000.0,), (3000.0,), 2)
