"""The optimizer step, in order, on one screen: once a global batch, after the last micro step's reduction."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ..mesh.collectives import Collectives
from ..optim.norm import clip_factor, global_totals
from ..optim.sharded import ShardOptimizer
from ..parallel.tensor.same_steps import StepWatch
from ..precision.non_finite import first_non_finite
from ..zero.access.script_writes import ScriptWrites
from ..zero.grads.reducer import GradReducer
from ..zero.params.publisher import publish
from ..zero.params.store import ParamStore
from ..zero.units.plan import ZeroPlan
from ..zero.units.unit import ParamUnit
from .step_sums import NUMBERS, StepSums, read_sums


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        grad_norm: global gradient norm before clipping, without the loss scale.
        applied: whether the parameters were updated.
        sums: numbers of all ranks, added up.
        non_finite: name of the first parameter with an inf or nan gradient, where the norm is inf or nan. None where
            the norm is finite, or only the sum of the squares has left fp32's range.
        loss_scale: factor that the losses of this step were multiplied by.
        ahead: share of what this rank updates in host memory whose update was computed before the norm was known, and
            counts; None: nothing is, as a rule.
    """

    grad_norm: float
    applied: bool
    sums: StepSums
    non_finite: str | None = None
    loss_scale: float = 1.0
    ahead: float | None = None

    @property
    def trouble(self) -> str:
        """What is wrong with a norm that is not finite, as a sentence begins."""
        if self.non_finite is None:
            return "the gradient norm is not finite"
        return f"the gradient of `{self.non_finite}` is not finite"


class DeferredUpdate(Protocol):
    """An update that is taken elsewhere, and may go on behind the step that began it."""

    @property
    def order(self) -> Sequence[int]:
        """Numbers of the units, as the last step has updated them."""
        ...

    def expect(self, coefficient: float | None) -> None:
        """A backward begins, and the last update has settled.

        Args:
            coefficient: factor that `begin` will get if neither clipping nor overflow acts; None where more micro steps
                come before the next update, or masters lack values that the script has written.
        """
        ...

    def leave_out(self) -> None:
        """There is no update from the accumulated gradients."""
        ...

    def begin(self, coefficient: float, unused: Collection[str] = ()) -> None:
        """Begins the update from the accumulated gradients; the last one has settled. Every rank must call.

        Args:
            coefficient: gradients are multiplied by it first, see `clip_factor`.
            unused: parameters that no rank has a gradient of, which are left as they are.
        """
        ...

    def share_ahead(self) -> float | None:
        """Returns how much of the last update was computed before it was begun, and counts; None: none ever is."""
        ...

    def settle(self) -> None:
        """Returns when the last update is done and its parameters are where forward reads them."""
        ...

    def buffers(self) -> list[Tensor]:
        """Returns the memory it holds besides the units' own and the optimizer's states."""
        ...

    def close(self) -> None:
        """Settles, and lets go of threads; no update may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Spread:
    """How the gradients of a job lie over its ranks.

    Attributes:
        over_ranks: whether a rank has less than all gradients of the job, so that what each has counted is summed up.
        total_numel: elements of all ranks' units, each once; the same number on every rank.
    """

    over_ranks: bool
    total_numel: int


def holds_parts(units: Sequence[ParamUnit], world: Collectives) -> bool:
    """Whether ranks hold parts of some units, and not all of them whole or in ZeRO's slices; the same on every rank."""
    return any(unit.replicas.size < world.size for unit in units)


def spread_of(
    units: Sequence[ParamUnit], plan: ZeroPlan, world: Collectives, *, stages: int, device: torch.device
) -> Spread:
    """Returns how gradients lie over the ranks; every rank must call.

    Enters an all-reduce over `world` where ranks hold parts of the model, for parts may differ in size.

    Args:
        units: all units of this rank.
        plan: plan of what is sharded.
        world: all ranks of the job.
        stages: pipeline stages of the model.
        device: device of the gradients.
    """
    parts = stages > 1 or holds_parts(units, world)
    if not parts:
        return Spread(plan.shard_optimizer, sum(unit.layout.padded_numel for unit in units))
    # Each rank counts its slice, for each element is in one rank's: with stages, as many as one stage would have.
    mine = float(sum(unit.layout.shard_numel for unit in units))
    total = torch.tensor([mine], dtype=torch.float64, device=device)
    world.all_reduce(total, label="elements of all ranks").wait()
    with world.reading("elements of all ranks"):
        return Spread(True, int(total.item()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step works on, in the order in which it is used.

    Attributes:
        units: all units.
        plan: plan of what is sharded.
        world: all ranks of the job.
        spread: spread of the gradients over the ranks.
        pipeline: this rank's pipeline stage, and the number of stages.
        device: device of the gradients.
        reducer: reducer of the gradients.
        optimizer: sharded optimizer of the master parameters.
        store: parameter store.
        writes: watch over what scripts write to parameters.
        away: update that is taken where masters do not lie beside the parameters; None where they do.
        same: watch over what ranks that share each layer do; None where none do, or nothing is to be compared.
    """

    units: Sequence[ParamUnit]
    plan: ZeroPlan
    world: Collectives
    spread: Spread
    reducer: GradReducer
    optimizer: ShardOptimizer
    store: ParamStore
    writes: ScriptWrites
    away: DeferredUpdate | None = None
    pipeline: tuple[int, int] = (0, 1)
    device: torch.device
    same: StepWatch | None = None


def take_step(
    parts: StepParts,
    *,
    at: str,
    numbers_N: Tensor,
    clipping: float,
    skip_non_finite: bool,
    loss_scale: float = 1.0,
) -> StepResult:
    """Updates the parameters from the accumulated gradients; every rank must call.

    Args:
        parts: parts that the step works on.
        at: text that names the step, for error messages.
        numbers_N: fp64, this rank's `RankNumbers` since the last step.
        clipping: largest global gradient norm; 0 for none.
        skip_non_finite: whether the parameters stay as they are where a gradient is inf or nan.
        loss_scale: factor that the losses of this step were multiplied by before their backward.

    Raises:
        ModelError: the ranks gathered different units, so what they computed is not one model's; or ranks that share
            each layer had other inputs, random numbers or losses. On every rank.
    """
    # 1. The one host read: the norm over all ranks, and with it the mean loss and whether all gathered the same. Two
    #    all-reduces of a few numbers where gradients are sharded, else one.
    parts.reducer.settle()
    unused = parts.reducer.unused
    totals = global_totals(
        parts.reducer.sums.norms(),
        parts.world,
        spread=parts.spread.over_ranks,
        total_numel=parts.spread.total_numel,
        mark=parts.store.take_fingerprint() ^ parts.writes.take_mark(),
        stage=parts.pipeline,
        extra_N=numbers_N,
        more=[
            *([] if unused is None else [unused.count_1()]),
            *([] if parts.same is None else [parts.same.shared_3()]),
        ],
    )
    if totals.differing:
        if parts.pipeline[0] not in totals.differing:
            raise ModelError(
                f"model: the ranks of pipeline stage {totals.differing[0]} did not do the same{at}; the first of them "
                "says what they did",
            )
        parts.writes.refuse_differences(at)
        parts.store.refuse_order(at)
    if parts.same is not None:
        parts.same.refuse_differences(totals.sums[-3:], parts.world, at=at)
        parts.same.forget()
    norm = totals.norm / loss_scale

    # 2. The update of the ranges this rank owns, then of the parameters that forward reads. All ranks see the same
    #    norm, so all of them skip or none. Only where a rank has not used a parameter, one more all-reduce says which
    #    ones all of them mean.
    is_finite = math.isfinite(norm)
    applied = is_finite or not skip_non_finite
    non_finite = None if is_finite else _first_non_finite(parts)
    used_factor = None
    if applied:
        factor = clip_factor(norm, limit=clipping, loss_scale=loss_scale)
        left_out = frozenset[str]() if unused is None else unused.agree(totals.sums[NUMBERS])
        if parts.away is None:
            used_factor = parts.optimizer.step(factor, left_out)
            publish(parts.units, parts.plan, parts.store)
        else:
            parts.away.begin(factor, left_out)
    elif parts.away is not None:
        parts.away.leave_out()

    # 3. Room for the next global batch's gradients.
    parts.reducer.zero(used_factor=used_factor)
    ahead = None if parts.away is None else parts.away.share_ahead()
    return StepResult(norm, applied, read_sums(totals.sums), non_finite, loss_scale, ahead)


def _first_non_finite(parts: StepParts) -> str | None:
    ranges = ((unit.layout, unit.owned[0], parts.reducer.sums.read(unit.index)) for unit in parts.units)
    return first_non_finite(
        ranges, parts.world, spread=parts.spread.over_ranks, device=parts.device, stage=parts.pipeline
    )
