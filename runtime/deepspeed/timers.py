"""Timers and ranges of profilers, by DeepSpeed's names, for scripts that measure. The engine measures steps elsewhere.

On a GPU a timer records events and waits for them when it is read, so it measures the GPU's work and holds nothing up
before. On the CPU it reads the clock.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import psutil
import torch

from dsrun.errors import ModelError
from dsrun.log_on_ranks import logger

from ..accelerator import get_accelerator
from .memory import own_rank

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "TIME_EPSILON",
    "CudaEventTimer",
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "trim_mean",
]

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TIME_EPSILON = 1e-6

_GIB = 1 << 30
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class CudaEventTimer:
    """The time between two events of a GPU.

    Args:
        start_event: first event, recorded with its time.
        end_event: last event, likewise.
    """

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def get_elapsed_msec(self) -> float:
        """Waits for the last event; returns milliseconds."""
        self.end_event.synchronize()
        return self.start_event.elapsed_time(self.end_event)


class _HostTimer:
    """The time between two readings of the clock, in seconds."""

    def __init__(self, start: float, end: float) -> None:
        self._seconds = end - start

    def get_elapsed_msec(self) -> float:
        return self._seconds * 1000


class SynchronizedWallClockTimer:
    """Timers by their names, each made where it is first asked for."""

    class Timer:
        """One timer, which may be started and stopped many times.

        Args:
            name: its name.
        """

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self.use_host_timer = get_accelerator().use_host_timers()
            self.event_timers: list[CudaEventTimer | _HostTimer] = []
            self.elapsed_records: list[float] | None = None
            self._start: Any = None

        def start(self) -> None:
            """Begins.

            Raises:
                ModelError: it has begun.
            """
            if self.started_:
                raise ModelError(f"timer {self.name_!r}: it has been started", hint="stop it first")
            self._start = self._now()
            self.started_ = True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Ends.

            Args:
                reset: DeepSpeed's argument, without effect, as there.
                record: DeepSpeed's argument, without effect, as there.

            Raises:
                ModelError: it has not begun.
            """
            del reset, record
            if not self.started_:
                raise ModelError(f"timer {self.name_!r}: it has not been started", hint="start it first")
            kind = _HostTimer if self.use_host_timer else CudaEventTimer
            self.event_timers.append(kind(self._start, self._now()))
            self._start, self.started_ = None, False

        def reset(self) -> None:
            """Forgets all that was measured."""
            self.started_, self._start, self.elapsed_records = False, None, None
            self.event_timers.clear()

        def elapsed(self, reset: bool = True) -> float:
            """Returns the milliseconds of all times since the last reset, up to now for one that has begun.

            Args:
                reset: forget them.
            """
            goes_on = self.started_
            if goes_on:
                self.stop()
            self.elapsed_records = [timer.get_elapsed_msec() for timer in self.event_timers]
            total = sum(self.elapsed_records)
            if reset:
                self.reset()
            if goes_on:
                self.start()
            return total

        def mean(self) -> float:
            """Returns the mean of these milliseconds, without the longest and the shortest tenth."""
            self.elapsed(reset=False)
            return trim_mean(self.elapsed_records or [], 0.1)

        def _now(self) -> Any:
            if self.use_host_timer:
                return time.perf_counter()
            event = get_accelerator().Event(enable_timing=True)
            event.record()
            return event

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Returns a timer by its name."""
        if name not in self.timers:
            self.timers[name] = self.Timer(name)
        return self.timers[name]

    def has_timer(self, name: str) -> bool:
        """Whether a timer was asked for before."""
        return name in self.timers

    def get_timers(self) -> Mapping[str, Timer]:
        """Returns all timers by their names."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Returns a line with the memory in use, and the most of it so far."""
        accelerator = get_accelerator()
        figures = {
            "mem_allocated": accelerator.memory_allocated(),
            "max_mem_allocated": accelerator.max_memory_allocated(),
            "cache_allocated": accelerator.memory_cached(),
            "max_cache_allocated": accelerator.max_memory_cached(),
        }
        return "".join(f" | {name}: {bytes_ / _GIB:.4f} GB" for name, bytes_ in figures.items())

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints a line with the milliseconds of some timers.

        Args:
            names: their names; those that nobody asked for are left out.
            normalizer: number that they are divided by, above 0.
            reset: forget what they measured.
            memory_breakdown: DeepSpeed's argument, without effect, as there.
            ranks: ranks that print the line; None: rank 0. With -1 in it: all.

        Raises:
            ModelError: `normalizer` is not above 0.
        """
        del memory_breakdown
        _check_normalizer(normalizer)
        times = [(name, self.timers[name].elapsed(reset=reset) / normalizer) for name in names if name in self.timers]
        rank, chosen = own_rank(), ranks or [0]
        if rank in chosen or -1 in chosen:
            print(f"[Rank {rank}] time (ms)" + "".join(f" | {name}: {time_ms:.2f}" for name, time_ms in times))

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Returns the mean of each of some timers, in thousandths of a millisecond, as DeepSpeed does.

        Args:
            names: their names; those that nobody asked for are left out.
            normalizer: number that they are divided by, above 0.
            reset: DeepSpeed's argument, without effect, as there.

        Raises:
            ModelError: `normalizer` is not above 0.
        """
        del reset
        _check_normalizer(normalizer)
        return {name: self.timers[name].mean() * 1000 / normalizer for name in names if name in self.timers}


class NoopTimer:
    """In the place of `SynchronizedWallClockTimer`: measures nothing."""

    class Timer:
        """In the place of one timer: measures nothing."""

        def start(self) -> None:
            """Does nothing."""

        def reset(self) -> None:
            """Does nothing."""

        def stop(self, **options: Any) -> None:
            """Does nothing."""

        def elapsed(self, **options: Any) -> float:
            """Returns 0."""
            return 0

        def mean(self) -> float:
            """Returns 0."""
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        """Returns the timer that measures nothing."""
        return self.timer

    def has_timer(self, name: str) -> bool:
        """Returns True: each name has the timer that measures nothing."""
        return True

    def get_timers(self) -> Mapping[str, Timer]:
        """Returns no timers."""
        return {}

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Does nothing."""

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Returns None."""


class _ThroughputSettings(Protocol):
    """What a `ThroughputTimer` reads of its config."""

    @property
    def enabled(self) -> bool:
        """Whether it measures."""
        ...

    @property
    def synchronized(self) -> bool:
        """Whether it waits for the GPU before it reads the clock."""
        ...


class ThroughputTimer:
    """Samples a second, over the steps that one starts and stops.

    Args:
        config: object with `enabled` and `synchronized`, which says to wait for the GPU.
        batch_size: samples of a step; None: 1.
        start_step: steps before the first one that counts.
        steps_per_output: steps between two lines; None: none are said.
        monitor_memory: say a line about the host's memory too.
        logging_fn: function that says a line; None: that of the logger.
    """

    def __init__(
        self,
        config: _ThroughputSettings,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logger.info if logging_fn is None else logging_fn
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.start_time = self.end_time = 0.0
        self.started = self.initialized = False

    def update_epoch_count(self) -> None:
        """Begins an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begins a micro step."""
        if not self.config.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends a micro step.

        Args:
            global_step: whether it was a step's last one.
            report_speed: say the line, where one is due.
        """
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time <= 0:
            return
        self.end_time = self._now()
        self.total_elapsed_time += self.end_time - self.start_time
        self.step_elapsed_time += self.end_time - self.start_time
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Returns samples a second over all steps that count; minus infinity before the first."""
        steps = self.global_step_count - self.start_step
        if self.global_step_count == 0 or steps == 0 or self.total_elapsed_time == 0:
            return float("-inf")
        return self.batch_size / (self.total_elapsed_time / steps)

    def _report(self) -> None:
        accelerator = get_accelerator()
        place = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
        now = self.batch_size / (self.step_elapsed_time + TIME_EPSILON)
        memory = [
            round(bytes_ / _GIB, 2) for bytes_ in (accelerator.memory_allocated(), accelerator.max_memory_allocated())
        ]
        self.logging(
            f"{place}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={now}, "
            f"MemAllocated={memory[0]}GB, MaxMemAllocated={memory[1]}GB"
        )
        if self.monitor_memory:
            self.logging(f"{place}, vm %: {psutil.virtual_memory().percent}, swap %: {psutil.swap_memory().percent}")

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Returns the mean of numbers without the largest and the smallest of them; 0 of none.

    Args:
        data: numbers.
        trim_percent: share of the numbers that is left out at each end, from 0 to below a half; rounded to whole ones.

    Raises:
        ModelError: nothing would be left.
    """
    if not data:
        return 0
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut] if 0 <= trim_percent <= 1 else []
    if not kept:
        raise ModelError(f"trim_mean: trim_percent is {trim_percent}; expected a share that leaves some of {len(data)}")
    return sum(kept) / len(kept)


def instrument_w_nvtx(func: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Returns a function whose calls are ranges of NVTX by its name; on the CPU, and for a compiler, they are none."""

    @functools.wraps(func)
    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        accelerator.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return call


def _check_normalizer(normalizer: float) -> None:
    if not normalizer > 0:
        raise ModelError(f"timers: normalizer is {normalizer}; expected a number above 0")
