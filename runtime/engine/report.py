"""What the user sees of a step: a record, and a printed line now and then. Measures wall time and the mean loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsrun.contract.step_records import PHASES, STEP_EVENT, StepRecord, step_fields

from ..observe.records import RecordWriter
from ..observe.steps.figures import Figures, StepFigures, memory_by_tier
from ..observe.steps.script_figures import ScriptFigures
from ..observe.steps.tokens import count_labels, count_tokens, count_unpadded
from ..observe.wait_report import WaitReport
from ..observe.wear import DiskWear
from ..parallel.tensor.same_steps import StepWatch
from .progress import Counters
from .step import StepResult
from .step_sums import RankNumbers, StepSums

#: Significant digits of rates: a small model on processors makes 1e-5 TFLOP/s.
_DIGITS = 6


class StepReport:
    """Collects losses between optimizer steps and reports each step from rank 0.

    Args:
        records: writer of the run's records, which gets each step.
        data_ranks: ranks with samples of their own.
        counts_tokens: whether this rank's tokens are counted: of ranks that share samples, the first one's are.
        counts_labels: whether its labels are counted; of a pipeline, those of the last stage are.
        counts_losses: whether its losses count; of a pipeline, those of the last stage do.
        tells: whether this rank writes records and prints lines.
        steps_per_print: optimizer steps between printed lines; None for none.
        device: device that losses are summed on, so that the host need not read them.
        on_drives: function that returns the bytes of this rank's files on drives.
        total_steps: optimizer steps of the whole run, where the schedule says so.
        figures: seconds, waits and traffic of this rank's steps.
        script: figures that the script has logged.
        peak_flops: operations per second of all devices together by their datasheet; None where it is not known.
        times_steps: whether the line that is printed has the seconds of each phase, as `wall_clock_breakdown` asks.
        wear: counter of the bytes written to disks; None where nothing goes to disks.
        waits: report of what the ranks wait in; None for none.
        same: watch over what ranks that share each layer do; None for none.
    """

    def __init__(
        self,
        records: RecordWriter,
        *,
        data_ranks: int,
        counts_tokens: bool,
        counts_labels: bool,
        counts_losses: bool,
        tells: bool,
        steps_per_print: int | None,
        device: torch.device,
        on_drives: Callable[[], int],
        total_steps: int | None,
        figures: StepFigures,
        script: ScriptFigures,
        peak_flops: float | None = None,
        times_steps: bool = False,
        wear: DiskWear | None = None,
        waits: WaitReport | None = None,
        same: StepWatch | None = None,
    ) -> None:
        self._data_ranks = data_ranks
        self._counts_tokens = counts_tokens
        self._counts_labels = counts_labels
        self._counts_losses = counts_losses
        self._tells = tells
        self._records = records
        self._steps_per_print = steps_per_print
        #: What this rank adds to the sums of the present step.
        self.numbers = RankNumbers(device)
        self._losses = 0
        self._missed = False  # a loss of the present step
        self._device = device
        self._on_drives = on_drives
        self._total_steps = total_steps
        self._figures = figures
        self._peak_flops = peak_flops
        self._times_steps = times_steps
        self._wear = wear
        self._waits = waits
        self._same = same
        self._started = time.perf_counter()
        self._script = script

    def add_loss(self, loss: Tensor) -> None:
        """Takes one micro batch's mean loss, detached, [1], on any device: scripts move what the model returns."""
        if self._counts_losses:
            self.numbers.add("losses", loss)
        if self._same is not None:
            self._same.add_loss(loss)
        self._losses += 1

    def pass_loss(self) -> None:
        """Counts a micro batch whose loss another rank of the pipeline has."""
        self._losses += 1

    def forget_losses(self) -> None:
        """Forgets the losses and tokens of a global batch that is given up."""
        self.numbers.forget()
        if self._same is not None:
            self._same.forget()
        self._losses = 0
        self._missed = False

    def miss_loss(self) -> None:
        """A micro batch's loss is not known: the mean of this step is not told."""
        self._missed = True

    def add_stop_request(self, number: float) -> None:
        """Tells the other ranks a number with the next step, see `stop_signals`."""
        self.numbers.put("stop_request", number)

    def add_tokens(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the tokens of one forward that trains, from its arguments."""
        if not self._counts_tokens:
            return
        padded = count_tokens(args, kwargs)
        if padded:
            self.numbers.add("tokens_padded", padded)
            self.numbers.add("tokens", count_unpadded(args, kwargs, padded))

    def add_labels(self, labels: object) -> None:
        """Takes the labels of one forward that trains, as far as they are labels of tokens."""
        found = count_labels(labels) if self._counts_labels else None
        if found is not None:
            self.numbers.add("labels", found[0])
            self.numbers.add("tokens_in_loss", found[1])

    def add_flops(self, model: float, hardware: float) -> None:
        """Takes the operations of this rank's forwards and backwards of a step, each once, and all of them.

        Args:
            model: operations, each once; -inf where they are not known.
            hardware: operations with those that are computed again.
        """
        self.numbers.add("model_flops", model)
        self.numbers.add("hardware_flops", hardware)

    def step(
        self, result: StepResult, counters: Counters, *, lr: list[float], samples: int, next_scale: float = 1.0
    ) -> None:
        """Reports one optimizer step; every rank must call, as the ranks compare their waits now and then.

        Args:
            result: result of the step.
            counters: training counters, with this step counted.
            lr: the rates it was taken with.
            samples: number of samples of all ranks in this step.
            next_scale: loss scale of the next step.
        """
        loss = None if self._missed else result.sums.losses / (max(1, self._losses) * self._data_ranks)
        self._missed = False
        self.numbers.clear()
        self._losses = 0
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        number = counters.global_steps
        figures = self._figures.take()
        if self._waits is not None:
            self._waits.end_step(number)
        if not self._tells:
            return
        self._script.settle()
        if self._records.is_kept:
            self._record(result, counters, figures, loss=loss, lr=lr, seconds=seconds)
        if result.applied and not math.isfinite(result.grad_norm):
            print(f"step {number}: {result.trouble}, and the update was applied", flush=True)
        if not result.applied:
            scale = (
                "" if next_scale == result.loss_scale else f"; loss scale {result.loss_scale:.12g} -> {next_scale:.12g}"
            )
            print(f"step {number}: {result.trouble}, the update was skipped{scale}", flush=True)
        told = "loss not seen" if loss is None else f"loss {loss:.4f}"
        if self._steps_per_print and number % self._steps_per_print == 0:
            print(
                f"step {number:>5}  {told}  lr {lr[0]:.2e}  grad norm {result.grad_norm:.3f}  "
                f"{samples / seconds:.1f} samples/s",
                flush=True,
            )
        if self._times_steps and number % (self._steps_per_print or 1) == 0:
            print(phases_line(number, figures), flush=True)

    def _record(
        self,
        result: StepResult,
        counters: Counters,
        figures: Figures,
        *,
        loss: float | None,
        lr: list[float],
        seconds: float,
    ) -> None:
        # Values, and nothing that would keep the engine: the thread that calls `fields` may let go of it last.
        step, samples, total_steps = counters.global_steps, counters.global_samples, self._total_steps
        device, on_drives, peak_flops = self._device, self._on_drives(), self._peak_flops
        offload: dict[str, Any] = {
            **({"stepped_ahead": round(result.ahead, 4)} if result.ahead is not None else {}),
            **(self._wear.take_step() if self._wear is not None else {}),
        }

        def fields() -> dict[str, Any]:
            most_bytes, memory = memory_by_tier(device, on_drives=on_drives)
            record = StepRecord(
                step=step,
                time=0.0,
                seconds=round(seconds, 6),
                samples=samples,
                loss=loss,
                lr=lr[0],
                lrs=tuple(lr) if len(lr) > 1 else (),
                grad_norm=result.grad_norm,
                applied=result.applied,
                loss_scale=result.loss_scale if result.loss_scale != 1.0 else None,
                non_finite=result.non_finite,
                total_steps=total_steps or None,
                memory_bytes=most_bytes,
                memory=memory,
                phases={name: round(each, 6) for name, each in figures.phases.items()},
                waits_s=round(figures.waits_s, 6) or None,
                pipeline_wait_s=round(figures.pipeline_wait_s, 6) or None,
                traffic=figures.traffic,
                **_counted(result.sums, seconds, peak_flops=peak_flops),
            )
            return {**step_fields(record), **offload}

        self._records.write_behind(STEP_EVENT, fields)


def phases_line(number: int, figures: Figures) -> str:
    """Returns the seconds of a step by phase as `wall_clock_breakdown` prints them.

    Args:
        number: number of the step.
        figures: figures of rank 0.
    """
    parts = [f"{name} {1000 * figures.phases[name]:.2f}" for name in PHASES if name in figures.phases]
    waits = f"; waits for other ranks {1000 * figures.waits_s:.2f}" if figures.waits_s else ""
    return f"step {number:>5}  time (ms): {'  '.join(parts)}{waits}"


def _counted(sums: StepSums, seconds: float, *, peak_flops: float | None) -> dict[str, Any]:
    """Returns what was counted in a step, of all ranks, and the rates."""
    told: dict[str, Any] = {}
    if sums.tokens_padded:
        told["tokens"] = int(sums.tokens)
        told["tokens_per_s"] = _digits(sums.tokens / seconds)
        if sums.tokens != sums.tokens_padded:
            told["tokens_padded"] = int(sums.tokens_padded)
    if sums.labels and sums.tokens_in_loss != sums.labels:
        told["tokens_in_loss"] = int(sums.tokens_in_loss)
    if sums.model_flops and math.isfinite(sums.model_flops):
        told["model_tflops"] = _digits(sums.model_flops / seconds / 1e12)
        told["hardware_tflops"] = _digits(sums.hardware_flops / seconds / 1e12)
        if peak_flops:
            told["mfu"] = _digits(sums.model_flops / seconds / peak_flops)
            told["hfu"] = _digits(sums.hardware_flops / seconds / peak_flops)
    return told


def _digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
