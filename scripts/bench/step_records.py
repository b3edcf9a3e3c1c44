"""What it costs a rank to record a step: its numbers, its phases and its line.

    python scripts/bench/step_records.py [--steps 400] [--rounds 15] [--micro 4]

The calls that an engine makes in a step of some micro batches, one after the other and without a model between them:
phases entered, tokens and labels counted, the report of the step with a real file behind it. Behind each step stands a
product of matrices, as a model has them, in which the thread that writes the lines finds its time; it is not counted.
Figures are microseconds of these calls a step on the wall, medians over rounds with the least and the most, and the
share of a step of 50 ms.

Caveats: one process, CPU; a batch is 4 x 1,024 tokens with an attention mask and labels, whose numbers are counted on
the CPU here and by small kernels behind others on a GPU. Other work on the machine lengthens all of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from dsrun.contract.heartbeats import HeartbeatTable, HeartbeatWriter
from dsrun.runtime.engine.progress import Counters
from dsrun.runtime.engine.report import StepReport
from dsrun.runtime.engine.step import StepResult
from dsrun.runtime.engine.step_sums import read_sums
from dsrun.runtime.mesh.wait_times import WaitTimes
from dsrun.runtime.observe.records import RecordWriter
from dsrun.runtime.observe.steps.figures import StepFigures
from dsrun.runtime.observe.steps.phase_times import PhaseTimes
from dsrun.runtime.observe.steps.script_figures import ScriptFigures

_STEP_US = 50_000
_PRODUCT = torch.ones(512, 512)
_IDS = torch.randint(0, 1000, (4, 1024))
_BATCH = {"input_ids": _IDS, "attention_mask": torch.ones_like(_IDS), "labels": _IDS.clone()}


class Steps:
    """Recorded steps without a model.

    Args:
        path: file of the records; None: nothing is recorded, and the rest is done all the same.
        micro: number of micro batches of a step.
    """

    def __init__(self, path: Path | None, *, micro: int) -> None:
        self._micro = micro
        self._table = HeartbeatTable(1)
        self._heartbeat = HeartbeatWriter(self._table.path)
        self._phases = PhaseTimes()
        self._heartbeat.follow_phases(self._phases.enter)
        self.records = RecordWriter(path)
        figures = StepFigures(
            self._phases, WaitTimes(self._heartbeat), moved=lambda: {"data": 1 << 20, "tensor": 1 << 10}, spread=None
        )
        self._report = StepReport(
            self.records,
            data_ranks=1,
            counts_tokens=path is not None,
            counts_labels=path is not None,
            counts_losses=True,
            tells=True,
            steps_per_print=None,
            device=torch.device("cpu"),
            on_drives=lambda: 0,
            total_steps=1000,
            figures=figures,
            script=ScriptFigures(self.records, is_first=True),
            peak_flops=1e15,
        )
        self._counters = Counters()
        self._loss = torch.tensor([1.0])

    def run(self, steps: int) -> float:
        """Records so many steps; returns the seconds of their calls, without the product behind each."""
        in_calls_s = 0.0
        for _ in range(steps):
            begun_s = time.perf_counter()
            for _ in range(self._micro):
                self._heartbeat.beat(phase="forward")
                self._report.add_tokens((), _BATCH)
                self._report.add_labels(_BATCH["labels"])
                self._report.add_loss(self._loss)
                self._heartbeat.beat(phase="backward")
            self._heartbeat.beat(phase="step")
            self._report.add_flops(1e12, 1.3e12)
            self._counters.global_steps += 1
            sums = read_sums(self._report.numbers.values_N().tolist())
            self._report.step(StepResult(1.5, True, sums), self._counters, lr=[1e-3, 1e-4], samples=16)
            self._heartbeat.beat(step=self._counters.global_steps, phase="script")
            in_calls_s += time.perf_counter() - begun_s
            torch.mm(_PRODUCT, _PRODUCT)
        return in_calls_s


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro", type=int, default=4)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"recorded": Path(folder) / "records.jsonl", "not recorded": None}
        steps = {name: Steps(path, micro=options.micro) for name, path in kinds.items()}
        for round_ in range(options.rounds + 1):
            for name, each in steps.items():
                in_calls_s = each.run(options.steps)
                each.records.flush()
                if round_:  # the first one warms up
                    found.setdefault(name, []).append(in_calls_s / options.steps * 1e6)
    for name, values in found.items():
        middle = statistics.median(values)
        print(
            f"{name:<14} {middle:7.1f} us a step ({min(values):.1f} to {max(values):.1f}), "
            f"{middle / _STEP_US:.2%} of 50 ms"
        )


if __name__ == "__main__":
    main()
