"""The optimizer step, in order, on one screen: once a global batch, after the last micro step's reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..mesh.collectives import Collectives
from ..optim.norm import clip, global_norm
from ..optim.sharded import ShardOptimizer
from ..zero.plan import ZeroPlan
from ..zero.publisher import publish
from ..zero.reducer import GradReducer
from ..zero.store import ParamStore
from ..zero.unit import ParamUnit


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did: the gradient norm before clipping, and whether the update was applied."""

    grad_norm: float
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step works on, in the order in which it is used."""

    units: Sequence[ParamUnit]
    plan: ZeroPlan
    collectives: Collectives
    reducer: GradReducer
    optimizer: ShardOptimizer
    store: ParamStore


def take_step(parts: StepParts, *, clipping: float, skip_non_finite: bool) -> StepResult:
    """Updates the parameters from the accumulated gradients; every rank must call.

    Args:
        parts: what to work on.
        clipping: largest global gradient norm; 0 for none.
        skip_non_finite: leave the parameters as they are where a gradient is inf or nan.
    """
    # 0. What was computed must be one model's: one all-reduce of two numbers where parameters are sharded.
    parts.store.check_same_order()

    # 1. The norm over all ranks: two all-reduces of one number where gradients are sharded. The one host read.
    ranges = [unit.grad_sum for unit in parts.units]
    total = sum(unit.layout.padded_numel for unit in parts.units)
    spread = parts.collectives if parts.plan.shard_optimizer else None
    norm = float(global_norm(ranges, spread, total_numel=total))

    # 2. The update of the ranges this rank owns, then of the parameters that forward reads. All ranks see the same
    #    norm, so all of them skip or none.
    applied = math.isfinite(norm) or not skip_non_finite
    if applied:
        clip(ranges, norm, limit=clipping)
        parts.optimizer.step()
        publish(parts.units, parts.plan, parts.collectives, parts.store)

    # 3. Room for the next global batch's gradients.
    parts.reducer.zero()
    return StepResult(norm, applied)
