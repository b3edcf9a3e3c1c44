"""Figures that follow from a run's newest steps: what a step takes, when the run ends, where the loss goes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.contract.step_records import PHASES, StepRecord

from .run_figures import rate_of

#: Steps over which figures of a step are taken together.
WINDOW_STEPS = 50
#: Change of the loss, as a share of it, below which it is told to be level.
_LEVEL_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class LossTrend:
    """Where the loss is, and where it goes.

    Attributes:
        last: loss of the newest step; None where it is not finite, or not known.
        smoothed: mean of the last steps; None where none of them has a loss.
        change: share by which that differs from the mean of as many steps before; None where there are too few.
    """

    last: float | None
    smoothed: float | None
    change: float | None

    @property
    def word(self) -> str:
        """`falling`, `rising` or `level`; empty where nothing is known."""
        if self.change is None:
            return ""
        return "level" if abs(self.change) < _LEVEL_SHARE else "falling" if self.change < 0 else "rising"


def window(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """Returns the steps over which figures are taken together."""
    return list(steps)[-WINDOW_STEPS:]


def step_seconds(steps: Iterable[StepRecord]) -> float | None:
    """Returns the median duration of the last steps; None where there is none."""
    seconds = [each.seconds for each in window(steps)]
    return statistics.median(seconds) if seconds else None


def eta_s(steps: Sequence[StepRecord]) -> float | None:
    """Returns the seconds that the steps which are left take by the median of the last; None where nothing says it."""
    seconds = step_seconds(steps)
    if seconds is None or (total := steps[-1].total_steps) is None:
        return None
    return max(0, total - steps[-1].step) * seconds


def loss_trend(steps: Sequence[StepRecord]) -> LossTrend:
    """Returns where the loss is and where it goes, from the last steps."""
    now = [each.loss for each in steps[-WINDOW_STEPS:] if each.loss is not None]
    before = [each.loss for each in steps[-2 * WINDOW_STEPS : -WINDOW_STEPS] if each.loss is not None]
    last = steps[-1].loss if steps else None
    smoothed = statistics.fmean(now) if now else None
    earlier = statistics.fmean(before) if before else None
    if smoothed is None or not earlier:
        return LossTrend(last, smoothed, None)
    return LossTrend(last, smoothed, (smoothed - earlier) / abs(earlier))


def median_of(steps: Iterable[StepRecord], name: str) -> float | None:
    """Returns the median of a field over the last steps that have it; None where none has.

    Args:
        steps: steps of the run, in order.
        name: name of the field.
    """
    values = [value for each in window(steps) if (value := getattr(each, name)) is not None]
    return statistics.median(values) if values else None


def rate_median(steps: Sequence[StepRecord]) -> float | None:
    """Returns the median tokens a second of the last steps, or their samples where no tokens are known."""
    last = steps[-WINDOW_STEPS - 1 :]
    rates = [rate_of(step, before=before) for before, step in zip([None, *last], last, strict=False)]
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None


def phase_seconds(steps: Iterable[StepRecord]) -> Mapping[str, float]:
    """Returns the median seconds by phase of the last steps on rank 0; phases that take nothing are left out.

    A checkpoint is saved in few steps and has a median of 0, so its mean is taken, and so is that of an evaluation.
    """
    known = [each.phases for each in window(steps) if each.phases]
    if not known:
        return {}
    rare = ("save", "evaluate")
    seconds = {
        name: (statistics.fmean if name in rare else statistics.median)([each.get(name, 0.0) for each in known])
        for name in PHASES
    }
    return {name: value for name, value in seconds.items() if value > 0}


@dataclass(frozen=True, slots=True)
class TierUse:
    """Memory in use on one tier.

    Attributes:
        tier: `gpu`, `cpu` or `disk`; `device` where the record has one figure alone.
        nbytes: bytes of the rank that has most.
        rank: number of that rank.
    """

    tier: str
    nbytes: float
    rank: int


def memory_use(step: StepRecord, spread_memory: Mapping[str, tuple[float, int]]) -> list[TierUse]:
    """Returns the memory in use, of the rank that has most where the ranks were compared, else of rank 0.

    Args:
        step: newest step.
        spread_memory: bytes and number of the rank that has most, by tier.
    """
    tiers = {tier: TierUse(tier, nbytes, 0) for tier, nbytes in step.memory.items()}
    for tier, (nbytes, rank) in spread_memory.items():
        if tier not in tiers or nbytes > tiers[tier].nbytes:
            tiers[tier] = TierUse(tier, nbytes, rank)
    if not tiers and step.memory_bytes:
        return [TierUse("device", step.memory_bytes, 0)]
    return [each for each in tiers.values() if each.nbytes > 0]
