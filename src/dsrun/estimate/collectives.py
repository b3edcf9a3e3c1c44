"""Collectives of one optimizer step, counted as the runtime enters them, and what they put on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.estimate.settings import RunSettings
from dsrun.estimate.state import PaddedUnit, slot_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBytes:
    """Bytes of the whole buffers that enter collectives in one optimizer step, by kind."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int

    def sent_bytes(self, ranks: int) -> int:
        """Returns what one rank sends with ring algorithms, and receives as well.

        Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009: S(D-1)/D for a reduce-scatter or an
        all-gather of S bytes over D ranks, twice that for an all-reduce.
        """
        return (self.all_gather + self.reduce_scatter + 2 * self.all_reduce) * (ranks - 1) // ranks


def collective_bytes(units: Sequence[PaddedUnit], settings: RunSettings) -> CollectiveBytes:
    """Returns the collectives of parameters and gradients; those of single numbers (loss, norm) are left out.

    Gradients are reduced after every micro step at every stage. Parameters are gathered after the step at stages 1
    and 2, and at stage 3 whenever a unit is needed and its slot holds another one.

    Args:
        units: of the model, padded for the ranks.
        settings: stage, format and accumulation steps.
    """
    whole = sum(unit.padded for unit in units) * settings.compute_bytes
    reduced = whole * settings.accumulation_steps
    gathered = {0: 0, 1: whole, 2: whole, 3: 0}[settings.stage]
    if settings.stage == 3:
        gathered = gathered_numel(units, settings.accumulation_steps) * settings.compute_bytes
    return CollectiveBytes(
        all_gather=gathered,
        reduce_scatter=reduced if settings.stage >= 1 else 0,
        all_reduce=reduced if settings.stage == 0 else 0,
    )


def gathered_numel(units: Sequence[PaddedUnit], micro_steps: int) -> int:
    """Returns the elements that stage 3 gathers in one optimizer step: units in order forward, then backward.

    What a slot still holds from the use before is not gathered again: the last units of forward are the first of
    backward, and the first ones of backward's end those of the next micro step.
    """
    slots = slot_numbers(units)
    occupant: dict[int, int] = {}
    totals: list[int] = []
    # From the second micro step on, every one is like the one before.
    for _ in range(min(micro_steps, 2)):
        total = 0
        for index in (*range(len(units)), *reversed(range(len(units)))):
            if occupant.get(slots[index]) != index:
                occupant[slots[index]] = index
                total += units[index].padded
        totals.append(total)
    return totals[0] + totals[-1] * (micro_steps - 1)


def tensor_parallel_bytes(*, layers: int, hidden: int, settings: RunSettings) -> int:
    """Returns what one rank sends in a step for layers that are cut over ranks.

    Two all-reduces a block forward, two backward, and two more where its forward is computed again.

    Source: Megatron-LM (Shoeybi et al., 2019), section 3.
    """
    ranks = settings.tensor_parallel
    passes = 6 if settings.recompute == "blocks" else 4
    activation = hidden * settings.tokens_per_micro_step * settings.compute_bytes
    return passes * layers * settings.accumulation_steps * 2 * activation * (ranks - 1) // ranks
