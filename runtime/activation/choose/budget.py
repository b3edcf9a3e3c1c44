"""The fastest way to treat blocks so that their activations fit a budget: a choice from measured figures. Pure.

[Note: the peak]
Bytes that blocks keep add up until forward ends, and go away block by block in backward. A block that keeps something
else than its saved tensors has all of these again during its own backward, when the blocks after it are gone already.
So the most that is held of a micro batch is the larger of the sum over all blocks, and, for each such block, the sum
over those before it and all of its own. To recompute at the front and keep at the back is never worse.

A pipeline's stage holds several micro batches, of each of its chunks as many as the schedule says; at most one of them
is in backward. What waits for the gradients of weights alone is counted as all that its blocks save, however they are
treated. The budget must hold at every such moment.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsrun.pipeline_schedules.live import ONE_AT_A_TIME, LiveMoment

from .policy import Treatment

#: Partial plans that are followed at once: of the only chunk; of each of several, and of these put together, each with
#: each.
_MOST_PLANS = 4096
_MOST_PLANS_OF_SEVERAL = 128
_MOST_PLANS_TOGETHER = 1024


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
        chunk: position of its chunk among those of this rank.
    """

    live_bytes: int
    costs: Mapping[Treatment, Cost]
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice.

    Attributes:
        treatments: treatment of each block.
        peak_bytes: most bytes that are held at once; see [Note: the peak].
        seconds: more than keeping everything, of one micro batch.
    """

    treatments: tuple[Treatment, ...]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    """A plan of the last blocks of a chunk, or of all.

    Attributes:
        kept_bytes: bytes that a micro batch keeps from forward to backward.
        more_bytes: most that its backward holds beyond.
        seconds: more than keeping everything.
        treatments: treatment of each block.
    """

    kept_bytes: int = 0
    more_bytes: int = 0
    seconds: float = 0.0
    treatments: tuple[Treatment, ...] = ()

    def behind(self, block: BlockCosts, treatment: Treatment) -> _ChunkPlan:
        """Returns the plan with a block in front."""
        cost = block.costs[treatment]
        return _ChunkPlan(
            self.kept_bytes + cost.kept_bytes,
            max(self.more_bytes, block.live_bytes - cost.kept_bytes - self.kept_bytes),
            self.seconds + cost.seconds,
            (treatment, *self.treatments),
        )

    def bytes_at(self, moments: Sequence[LiveMoment], chunk: int) -> tuple[int, ...]:
        """Returns the bytes that it takes at each moment, beside what is put off."""
        return tuple(
            moment.counts[chunk] * self.kept_bytes + (self.more_bytes if moment.backward == chunk else 0)
            for moment in moments
        )


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """Plans of the first chunks of a rank, or of all.

    Attributes:
        spare_bytes: bytes of the budget that are left at each moment, if the other chunks take the least they can.
        seconds: more than keeping everything.
        chunks: plan of each chunk.
    """

    spare_bytes: tuple[int, ...]
    seconds: float = 0.0
    chunks: tuple[_ChunkPlan, ...] = ()


def solve(
    blocks: Sequence[BlockCosts], budget_bytes: int, *, moments: Sequence[LiveMoment] = ONE_AT_A_TIME
) -> Solution | None:
    """Returns the fastest choice whose peak is within the budget; None where there is none.

    Exact for one chunk with up to 4096 plans that no other beats in bytes and seconds, and for several with 1024 plans
    in all; beyond, the fastest of those with nearly the same bytes are followed, and a block more than need be may be
    computed again. Time grows with blocks x plans x treatments.

    Args:
        blocks: costs of the blocks, those of a chunk in order.
        budget_bytes: bytes that all micro batches together may take.
        moments: moments that the budget must hold at.
    """
    chunks = _chunks(blocks, moments)
    least = [_least(chunk).bytes_at(moments, position) for position, chunk in enumerate(chunks)]
    spare = tuple(budget_bytes - total for total in _least_at(chunks, moments))
    if min(spare) < 0:
        return None
    most = _MOST_PLANS if len(chunks) == 1 else _MOST_PLANS_OF_SEVERAL
    plans = [_RankPlan(spare)]
    for position, chunk in enumerate(chunks):
        fits = [left + own for left, own in zip(spare, least[position], strict=True)]
        grown: list[_RankPlan] = []
        for part in _front(chunk, position, fits, moments, most):
            takes = [own - slim for own, slim in zip(part.bytes_at(moments, position), least[position], strict=True)]
            for plan in plans:
                left = tuple(map(int.__sub__, plan.spare_bytes, takes))
                if min(left) >= 0:
                    grown.append(_RankPlan(left, plan.seconds + part.seconds, (*plan.chunks, part)))
        plans = _thinned(grown, _MOST_PLANS_TOGETHER, lambda plan: -min(plan.spare_bytes))
    best = min(plans, key=lambda plan: (plan.seconds, -min(plan.spare_bytes)))
    chosen = [iter(part.treatments) for part in best.chunks]
    treatments = tuple(next(chosen[block.chunk]) for block in blocks)
    return Solution(treatments, budget_bytes - min(best.spare_bytes), best.seconds)


def least_bytes(blocks: Sequence[BlockCosts], *, moments: Sequence[LiveMoment] = ONE_AT_A_TIME) -> int:
    """Returns the smallest budget that can be met: every block keeps the least it can.

    Args:
        blocks: costs of the blocks, those of a chunk in order.
        moments: moments that the budget must hold at.
    """
    return max(_least_at(_chunks(blocks, moments), moments))


def _chunks(blocks: Sequence[BlockCosts], moments: Sequence[LiveMoment]) -> list[list[BlockCosts]]:
    return [[block for block in blocks if block.chunk == position] for position in range(len(moments[0].counts))]


def _least_at(chunks: Sequence[Sequence[BlockCosts]], moments: Sequence[LiveMoment]) -> list[int]:
    """Returns the least bytes at each moment; what is put off is among them, for no plan changes that."""
    totals = [0] * len(moments)
    for position, chunk in enumerate(chunks):
        whole = sum(block.live_bytes for block in chunk)
        least = _least(chunk).bytes_at(moments, position)
        put_off = [moment.put_off[position] * whole for moment in moments]
        totals = list(map(sum, zip(totals, least, put_off, strict=True)))
    return totals


def _least(chunk: Sequence[BlockCosts]) -> _ChunkPlan:
    plan = _ChunkPlan()
    for block in reversed(chunk):
        plan = plan.behind(block, min(block.costs, key=lambda kind: block.costs[kind].kept_bytes))
    return plan


def _front(
    chunk: Sequence[BlockCosts], position: int, fits: Sequence[int], moments: Sequence[LiveMoment], most: int
) -> list[_ChunkPlan]:
    """Returns the plans of a chunk that no other beats, of those within the bytes of each moment in `fits`."""
    plans = [_ChunkPlan()]
    for block in reversed(chunk):
        # Of equal plans the first is followed: the one that keeps the blocks behind and treats this one.
        grown = [plan.behind(block, treatment) for plan in reversed(plans) for treatment in block.costs]
        fitting = [plan for plan in grown if all(map(int.__le__, plan.bytes_at(moments, position), fits))]
        plans = _thinned(_best(fitting), most, lambda plan: plan.kept_bytes)
    return plans


def _best(plans: list[_ChunkPlan]) -> list[_ChunkPlan]:
    """Those that no other beats in what is kept, in what its backward holds beyond, and in seconds."""
    plans.sort(key=lambda plan: (plan.kept_bytes, plan.more_bytes, plan.seconds))
    front: list[_ChunkPlan] = []
    # (bytes beyond, seconds) of plans that keep as little or less: seconds fall where bytes beyond grow.
    stairs: list[tuple[int, float]] = []
    for plan in plans:
        place = bisect(stairs, (plan.more_bytes, math.inf))
        if place and stairs[place - 1][1] <= plan.seconds:
            continue
        front.append(plan)
        while place < len(stairs) and stairs[place][1] >= plan.seconds:
            del stairs[place]
        stairs.insert(place, (plan.more_bytes, plan.seconds))
    return front


_Plan = TypeVar("_Plan", _ChunkPlan, _RankPlan)


def _thinned(plans: list[_Plan], most: int, bytes_of: Callable[[_Plan], int]) -> list[_Plan]:
    """Returns the fastest of those with nearly the same bytes, and the one with the fewest, which fits whatever comes.

    Ascending in bytes, where `plans` are.
    """
    if len(plans) <= most:
        return plans
    sizes = [bytes_of(plan) for plan in plans]
    least, step = min(sizes), (max(sizes) - min(sizes)) // most + 1
    fastest: dict[int, _Plan] = {}
    for plan, size in zip(plans, sizes, strict=True):
        place = -1 if size == least else (size - least) // step
        if place not in fastest or plan.seconds < fastest[place].seconds:
            fastest[place] = plan
    return list(fastest.values())
