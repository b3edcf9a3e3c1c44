"""What it costs a rank to record a step: its numbers, its phases and its line.

    python scripts/bench/step_records.py [--steps 400] [--rounds 15] [--micro 4]

The calls that an engine makes in a step of some micro batches: phases entered, tokens and labels counted, the report of
the step with a real file behind it. Between forward and backward of a micro batch, and behind a step, stand products of
matrices, as a model has them: they are not counted, but the calls find the processor's caches as a model leaves them.
Figures are microseconds a step: `calls`, of these calls on the wall, and `thread`, of the thread that writes the lines
on its processor, which holds up the Python of the step, and nothing else. Medians over rounds with the least and the
most; then what each part of recording adds, as a share of a step of 50 ms: writing records alone, and counting tokens
and labels for them.

Caveats: one process, one thread of torch, CPU; a batch is 4 x 1,024 tokens with an attention mask and labels, whose
numbers are counted on the CPU here and by small kernels behind others on a GPU. Other work on the machine lengthens all
of it.
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
_ROWS, _SQUARE = torch.ones(128, 256), torch.ones(256, 256)
_IDS = torch.randint(0, 1000, (4, 1024))
_BATCH = {"input_ids": _IDS, "attention_mask": torch.ones_like(_IDS), "labels": _IDS.clone()}


class Steps:
    """Recorded steps without a model.

    Args:
        path: file of the records; None: nothing is recorded, and the rest is done all the same.
        counts: whether tokens and labels are counted.
        micro: number of micro batches of a step.
    """

    def __init__(self, path: Path | None, *, counts: bool, micro: int) -> None:
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
            counts_tokens=counts,
            counts_labels=counts,
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

    def run(self, steps: int) -> tuple[float, float]:
        """Records so many steps; returns the seconds of their calls, and those of the thread on its processor."""
        in_calls_s, in_threads_s = 0.0, _other_threads_s()
        for _ in range(steps):
            for _ in range(self._micro):
                begun_s = time.perf_counter()
                self._heartbeat.beat(phase="forward")
                self._report.add_tokens((), _BATCH)
                self._report.add_labels(_BATCH["labels"])
                in_calls_s += time.perf_counter() - begun_s
                _compute()
                begun_s = time.perf_counter()
                self._report.add_loss(self._loss)
                self._heartbeat.beat(phase="backward")
                in_calls_s += time.perf_counter() - begun_s
                _compute()
            begun_s = time.perf_counter()
            self._heartbeat.beat(phase="step")
            self._report.add_flops(1e12, 1.3e12)
            self._counters.global_steps += 1
            sums = read_sums(self._report.numbers.values_N().tolist())
            self._report.step(StepResult(1.5, True, sums), self._counters, lr=[1e-3, 1e-4], samples=16)
            self._heartbeat.beat(step=self._counters.global_steps, phase="script")
            in_calls_s += time.perf_counter() - begun_s
            _compute()
        self.records.flush()
        return in_calls_s, _other_threads_s() - in_threads_s


def _compute() -> None:
    for _ in range(8):
        torch.relu(torch.mm(_ROWS, _SQUARE))


def _other_threads_s() -> float:
    return time.process_time() - time.thread_time()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "counted": Steps(Path(folder) / "counted.jsonl", counts=True, micro=options.micro),
            "written": Steps(Path(folder) / "written.jsonl", counts=False, micro=options.micro),
            "neither": Steps(None, counts=False, micro=options.micro),
        }
        for round_ in range(options.rounds + 1):
            for name, each in kinds.items():
                seconds = each.run(options.steps)
                if round_:  # the first one warms up
                    found.setdefault(name, []).append(seconds)
    in_us = 1e6 / options.steps
    for index, part in enumerate(("calls", "thread")):
        for name, rounds in found.items():
            values = [each[index] * in_us for each in rounds]
            print(
                f"{part:<6} {name:<7} {statistics.median(values):7.1f} us a step "
                f"({min(values):.1f} to {max(values):.1f})"
            )
    for what, more, less in (("writing", "written", "neither"), ("counting", "counted", "written")):
        calls, thread = (
            statistics.median(
                (with_[index] - without[index]) * in_us for with_, without in zip(found[more], found[less], strict=True)
            )
            for index in range(2)
        )
        print(
            f"{what:<8} adds {calls:.1f} us in calls, {calls / _STEP_US:.2%} of 50 ms, and {thread:.1f} us in the "
            f"thread, {thread / _STEP_US:.2%}"
        )


if __name__ == "__main__":
    main()
