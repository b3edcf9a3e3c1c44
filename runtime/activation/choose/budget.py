"""The fastest way to treat blocks so that their activations fit a budget: a choice from measured figures. Pure.

[Note: the peak]
Bytes that blocks keep add up until forward ends, and go away block by block in backward. A block that keeps something
else than its saved tensors has all of these again during its own backward, when the blocks after it are gone already.
So the most that is held is the larger of the sum over all blocks, and, for each such block, the sum over those before
it and all of its own. To recompute at the front and keep at the back is never worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .policy import Treatment

#: Partial plans that are followed at once; bytes of a budget are told apart in as many steps.
_MOST_PLANS = 4096


@dataclass(frozen=True, slots=True)
class Cost:
    """What one treatment of one block costs.

    Attributes:
        kept_bytes: bytes kept from forward to the block's backward.
        seconds: more than keeping everything.
    """

    kept_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """One block.

    Attributes:
        live_bytes: during its own backward, however it is treated.
        costs: cost of each treatment that the block may get; `KEEP` is always one of them.
    """

    live_bytes: int
    costs: Mapping[Treatment, Cost]


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice.

    Attributes:
        treatments: treatment of each block.
        peak_bytes: most bytes that are held at once; see [Note: the peak].
        seconds: more than keeping everything.
    """

    treatments: tuple[Treatment, ...]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Partial:
    sum_bytes: int
    peak_bytes: int
    seconds: float
    treatments: tuple[Treatment, ...]


def solve(blocks: Sequence[BlockCosts], budget_bytes: int) -> Solution | None:
    """Returns the fastest choice whose peak is within the budget; None where there is none.

    Exact for up to 4096 plans that no other beats in both bytes and seconds; beyond, bytes are rounded up to 1/4096 of
    the budget. Time grows with blocks x plans x treatments.
    """
    plans = [_Partial(0, 0, 0.0, ())]
    for block in blocks:
        grown = [
            _Partial(
                plan.sum_bytes + cost.kept_bytes,
                max(plan.peak_bytes, plan.sum_bytes + max(cost.kept_bytes, block.live_bytes)),
                plan.seconds + cost.seconds,
                (*plan.treatments, treatment),
            )
            for plan in plans
            for treatment, cost in block.costs.items()
        ]
        plans = _best([plan for plan in grown if plan.peak_bytes <= budget_bytes], budget_bytes)
    if not plans:
        return None
    best = min(plans, key=lambda plan: (plan.seconds, plan.peak_bytes))
    return Solution(best.treatments, best.peak_bytes, best.seconds)


def least_bytes(blocks: Sequence[BlockCosts]) -> int:
    """Returns the smallest budget that can be met: every block keeps the least it can."""
    total = peak = 0
    for block in blocks:
        kept = min(cost.kept_bytes for cost in block.costs.values())
        peak = max(peak, total + max(kept, block.live_bytes))
        total += kept
    return peak


def _best(plans: list[_Partial], budget_bytes: int) -> list[_Partial]:
    """Those that no other beats in bytes and in seconds; what happens to peaks so far is within the budget anyway."""
    plans.sort(key=lambda plan: (plan.sum_bytes, plan.seconds))
    front: list[_Partial] = []
    for plan in plans:
        if not front or plan.seconds < front[-1].seconds:
            front.append(plan)
    if len(front) <= _MOST_PLANS:
        return front
    step = max(1, budget_bytes // _MOST_PLANS)
    fastest: dict[int, _Partial] = {plan.sum_bytes // step: plan for plan in front}  # the last of a step is fastest
    return list(fastest.values())
