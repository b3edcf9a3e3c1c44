"""Records of a run as points of scalars, under the names that trackers get. Pure; knows no tracker.

[Note: names of scalars] DeepSpeed's own names come first: `Train/Samples/` with `train_loss`, `lr` and `loss_scale`,
and with `wall_clock_breakdown` the `elapsed_time_ms_` of forward, backward and step. What DeepSpeed has no name for
begins with `Train/Samples/` too. Figures of the script (`engine.log`) keep their names.

[Note: points that are taken back] A job that is started again goes on from its last checkpoint and takes some steps
again. The first point of these has `after_samples`: what a tracker was given beyond these samples does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dsrun.contract.step_records import LOG_EVENT, STEP_EVENT, LogRecord, StepRecord, read_log, read_step

_PREFIX = "Train/Samples/"
#: Fields of a step that are scalars as they are, by the last word of their name.
_FIELDS = {
    "train_loss": "loss",
    "lr": "lr",
    "loss_scale": "loss_scale",
    "grad_norm": "grad_norm",
    "tokens_per_s": "tokens_per_s",
    "model_tflops": "model_tflops",
    "hardware_tflops": "hardware_tflops",
    "mfu": "mfu",
    "hfu": "hfu",
    "seconds": "seconds",
    "seconds_waits": "waits_s",
    "seconds_pipeline_wait": "pipeline_wait_s",
}
#: DeepSpeed's timers, and the phases that they time.
_TIMERS = {"elapsed_time_ms_forward": "forward", "elapsed_time_ms_backward": "backward", "elapsed_time_ms_step": "step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Scalars of one moment of a run.

    Attributes:
        step: Optimizer steps taken until then.
        samples: Samples of those steps.
        time: Seconds since the epoch.
        values: Finite scalars by name; at least one.
        after_samples: Samples up to which older points count; None where all do, see [Note: points that are taken
            back].
        is_step: Whether it is that of an optimizer step; figures of the script have the samples of the step before.
    """

    step: int
    samples: int
    time: float
    values: Mapping[str, float]
    after_samples: int | None = None
    is_step: bool = True


class PointReader:
    """Turns records into points, in the order in which they were written.

    Args:
        with_timers: Whether points have DeepSpeed's timers.
        step: Number of the newest step of the records before; None where there was none.
    """

    def __init__(self, *, with_timers: bool, step: int | None = None) -> None:
        self._with_timers = with_timers
        self._step = step
        #: Engines that train in the process of rank 0; points of both in one curve would be none's.
        self.engines = 1
        self._unread = 0

    def read(self, record: Mapping[str, Any]) -> Iterator[Point]:
        """Yields the point of a record of the first engine, if it is a step or has finite figures of the script."""
        try:
            engine = int(record.get("engine", 0))
            if engine:
                self.engines = max(self.engines, engine + 1)
                return
            match record.get("event"):
                case event if event == STEP_EVENT:
                    step = read_step(record)
                    is_again = self._step is not None and step.step <= self._step
                    self._step = step.step
                    yield Point(
                        step=step.step,
                        samples=step.samples,
                        time=step.time,
                        values=_finite(step_scalars(step, with_timers=self._with_timers)),
                        after_samples=step.samples - 1 if is_again else None,
                    )
                case event if event == LOG_EVENT:
                    log = read_log(record)
                    values = _finite(log.values)
                    if values:
                        samples = _samples_of(log)
                        yield Point(step=log.step, samples=samples, time=log.time, values=values, is_step=False)
                case _:
                    pass
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self._unread += 1

    def take_unread(self) -> int:
        """Returns the number of records since it was last asked that lack a field: another version's, or damaged."""
        unread, self._unread = self._unread, 0
        return unread


def step_scalars(step: StepRecord, *, with_timers: bool) -> dict[str, float | None]:
    """Returns the scalars of a step by name, see [Note: names of scalars]; None where the record has none.

    Args:
        step: Step as it was recorded.
        with_timers: Whether DeepSpeed's timers are among them.
    """
    values: dict[str, float | None] = {name: getattr(step, field) for name, field in _FIELDS.items()}
    values |= {f"lr_group{at}": lr for at, lr in enumerate(step.lrs) if at > 0}
    values |= {f"seconds_{phase}": seconds for phase, seconds in step.phases.items()}
    values |= {f"memory_bytes_{tier}": size for tier, size in step.memory.items()}
    if with_timers:
        values |= {name: 1000 * step.phases[phase] for name, phase in _TIMERS.items() if phase in step.phases}
    return {f"{_PREFIX}{name}": value for name, value in values.items()}


def _samples_of(log: LogRecord) -> int:
    return int(log.samples)


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the values that are numbers: a tracker would draw 0 or nothing for the others."""
    return {name: value for name, value in values.items() if value is not None and isfinite(value)}
