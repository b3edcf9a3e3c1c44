"""What it costs a rank to record a step: its numbers, its phases and its line.

    python scripts/bench/step_records.py [--steps 400] [--rounds 15] [--micro 4]

The calls that an engine makes in a step of some micro batches, one after the other and without a model between them:
phases entered, tokens and labels counted, the report of the step with a real file behind it. `of the rank` is the wall
time of these calls in the rank's own thread; `with the writer` is the processor time of the whole process, the thread
that writes the lines included. Figures are microseconds a step, medians over rounds with the least and the most, and
the share of a step of 50 ms.

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

    def run(self, steps: int) -> None:
        """Records so many steps."""
        for _ in range(steps):
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
                begun_s, used_s = time.perf_counter(), time.process_time()
                each.run(options.steps)
                wall_s = time.perf_counter() - begun_s
                each.records.flush()
                if round_:  # the first one warms up
                    found.setdefault(f"{name}, of the rank", []).append(wall_s / options.steps * 1e6)
                    used = (time.process_time() - used_s) / options.steps * 1e6
                    found.setdefault(f"{name}, with the writer", []).append(used)
    for name, values in found.items():
        middle = statistics.median(values)
        print(
            f"{name:<28} {middle:7.1f} us a step ({min(values):.1f} to {max(values):.1f}), "
            f"{middle / _STEP_US:.2%} of 50 ms"
        )


if __name__ == "__main__":
    main()
