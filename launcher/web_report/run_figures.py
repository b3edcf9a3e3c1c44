"""Figures of a run at a glance: one number each, worked out of its records. Judges and draws nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsrun.contract.step_records import PHASES

from ..records.recorded_run import RecordedRun
from .curves import mean, median, smoothed

#: First steps of a run, which allocate and compile: shares leave them out where more follow.
_FIRST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of a run; NaN where one is not known.

    Attributes:
        steps: Number of steps that count.
        last_step: Number of the last step.
        total_steps: Steps of the whole run.
        last_loss: Loss, smoothed, at the last step that has one.
        is_loss_lost: Whether the last step has no loss that is finite, and earlier ones have.
        step_s: Median seconds of a step.
        slow_share: Share of the time that steps took beyond three times the median, saves and evaluations left out.
        tokens_per_s: Median tokens a second.
        samples_per_s: Median samples a second.
        model_tflops: Median TFLOP/s of the model.
        hardware_tflops: Median TFLOP/s with what is computed again.
        mfu: Median share of the devices' peak.
        skipped: Number of steps whose update was not taken.
        padding: Share of the tokens that are padding.
        lost_s: Seconds lost to failures: restarts, and steps that were taken again.
        whole_s: Seconds from the first start to the last step.
        peak_bytes: Most bytes by tier, over the ranks where that is known.
        shares: Share of the time by phase, and in `waits` and `pipeline_wait`, which are parts of the phases.
    """

    steps: int = 0
    last_step: int = 0
    total_steps: float = math.nan
    last_loss: float = math.nan
    is_loss_lost: bool = False
    step_s: float = math.nan
    slow_share: float = math.nan
    tokens_per_s: float = math.nan
    samples_per_s: float = math.nan
    model_tflops: float = math.nan
    hardware_tflops: float = math.nan
    mfu: float = math.nan
    skipped: int = 0
    padding: float = math.nan
    lost_s: float = 0.0
    whole_s: float = math.nan
    peak_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    shares: Mapping[str, float] = field(default_factory=dict[str, float])


def figures_of(run: RecordedRun) -> RunFigures:
    """Works out the figures of a run."""
    steps = run.steps
    if not len(steps):
        return RunFigures()
    seconds, times = steps["seconds"], steps["time"]
    step_s = median(seconds)
    loss = smoothed(steps["loss"], loss_window(len(steps)))
    # Of an attempt of which no step was kept the time is lost too, so it is a part of the whole.
    begin_s = min([times[0] - seconds[0], *(start["time"] for start in run.starts[:1])])
    return RunFigures(
        steps=len(steps),
        last_step=int(steps["step"][-1]),
        total_steps=steps["total_steps"][-1],
        last_loss=loss[-1],
        is_loss_lost=math.isfinite(loss[-1]) and not math.isfinite(steps["loss"][-1]),
        step_s=step_s,
        slow_share=_slow_share(run, step_s),
        tokens_per_s=median(steps["tokens_per_s"]),
        samples_per_s=median(samples_per_s(run)),
        model_tflops=median(steps["model_tflops"]),
        hardware_tflops=median(steps["hardware_tflops"]),
        mfu=median(steps["mfu"]),
        skipped=sum(1 for applied in steps["applied"] if applied == 0),
        padding=_padding(run),
        lost_s=sum(max(0.0, gap.seconds - step_s) for gap in run.gaps),
        whole_s=times[-1] - begin_s,
        peak_bytes=_peaks(run),
        shares=_shares(run),
    )


def loss_window(steps: int) -> int:
    """Returns over how many steps the loss is smoothed."""
    return max(5, min(500, steps // 40))


def samples_per_s(run: RecordedRun) -> list[float]:
    """Returns the samples a second of each step."""
    samples, seconds = run.steps["samples"], run.steps["seconds"]
    before = samples[0] - (samples[1] - samples[0]) if len(samples) > 1 else 0.0
    rates: list[float] = []
    for count, took_s in zip(samples, seconds, strict=True):
        rates.append((count - before) / took_s if took_s > 0 and count >= before else math.nan)
        before = count
    return rates


def _total(values: Sequence[float]) -> float:
    return math.fsum(value for value in values if math.isfinite(value))


def _padding(run: RecordedRun) -> float:
    """Returns the share of the tokens that are padding; a step that tells of none has none."""
    pairs = [each for each in zip(run.steps["tokens"], run.steps["tokens_padded"], strict=True) if each[0] == each[0]]
    whole = math.fsum(padded if padded == padded else tokens for tokens, padded in pairs)
    return 1 - math.fsum(tokens for tokens, _ in pairs) / whole if whole > 0 else math.nan


def _settled(values: Sequence[float]) -> Sequence[float]:
    return values[_FIRST_STEPS:] if len(values) > 5 * _FIRST_STEPS else values


def _shares(run: RecordedRun) -> dict[str, float]:
    whole = _total(_settled(run.steps["seconds"]))
    columns = {name: f"phases.{name}" for name in PHASES} | {"waits": "waits_s", "pipeline_wait": "pipeline_wait_s"}
    if whole <= 0:
        return {}
    return {
        name: _total(_settled(run.steps[column])) / whole for name, column in columns.items() if run.steps.has(column)
    }


def _slow_share(run: RecordedRun, step_s: float) -> float:
    seconds = run.steps["seconds"]
    known = [run.steps[f"phases.{name}"] for name in ("save", "evaluate")]
    beyond = 0.0
    for at in range(min(_FIRST_STEPS, len(seconds) - 1), len(seconds)):
        own_s = seconds[at] - sum(column[at] for column in known if math.isfinite(column[at]))
        beyond += own_s - step_s if own_s > 3 * step_s else 0.0
    whole = _total(_settled(seconds))
    return beyond / whole if whole > 0 else math.nan


def _peaks(run: RecordedRun) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for name in run.steps.names("memory."):
        peaks[name.removeprefix("memory.")] = max(value for value in run.steps[name] if math.isfinite(value))
    if "gpu" in peaks:
        peaks["gpu"] = max([peaks["gpu"], *(value for value in run.steps["memory_bytes"] if math.isfinite(value))])
    for name in run.spreads.names("memory."):
        if name.endswith(".most"):
            tier = name.removeprefix("memory.").removesuffix(".most")
            most = max(value for value in run.spreads[name] if math.isfinite(value))
            peaks[tier] = max(peaks.get(tier, 0.0), most)
    return peaks


def waits_of_ranks(run: RecordedRun) -> dict[int, float]:
    """Returns the mean share of a step that each rank has waited for others, by rank."""
    step_s = run.waits["step_s"]
    shares: dict[int, float] = {}
    for name in run.waits.names():
        if name.isdecimal():
            pairs = zip(run.waits[name], step_s, strict=True)
            shares[int(name)] = mean([waited / whole for waited, whole in pairs if whole > 0])
    return dict(sorted(shares.items()))
