"""Collectives of one optimizer step, counted as the runtime enters them, and what they put on the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.estimate.memory.model_state import FP32_BYTES, PaddedUnit, gathered_units
from dsrun.estimate.run.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBytes:
    """Bytes of the whole buffers that enter collectives in one optimizer step, by kind."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int


#: Whether a unit counts.
Counted = Callable[[PaddedUnit], bool]


def all_units(unit: PaddedUnit) -> bool:
    """Counts every unit."""
    return True


def collective_bytes(
    units: Sequence[PaddedUnit], settings: RunSettings, *, counted: Counted = all_units
) -> CollectiveBytes:
    """Returns the collectives of parameters and gradients; those of single numbers (loss, norm) are left out.

    Gradients are reduced after every micro step at every stage, or once an update, then in fp32. Parameters are
    gathered after the step at stages 1 and 2, and at stage 3 whenever a unit is needed and its slot holds another one.

    Args:
        units: units of the model, padded for the ranks.
        settings: stage, format and accumulation steps.
        counted: function that tells which of the units count; all of them take turns in the slots of stage 3.
    """
    elements = sum(unit.padded for unit in units if unit.trains and counted(unit))
    whole = elements * settings.compute_bytes
    reduced = FP32_BYTES * elements if settings.once_an_update else whole * settings.accumulation_steps
    gathered = {0: 0, 1: whole, 2: whole, 3: 0}[settings.stage]
    if settings.stage == 3:
        gathered = gathered_in_step(units, settings, counted=counted) * settings.compute_bytes
    return CollectiveBytes(
        all_gather=gathered,
        reduce_scatter=reduced if settings.stage >= 1 else 0,
        all_reduce=reduced if settings.stage == 0 else 0,
    )


def gathered_in_step(
    units: Sequence[PaddedUnit], settings: RunSettings, *, trained: bool = True, counted: Counted = all_units
) -> int:
    """Returns the elements that stage 3 gathers in one optimizer step, unit by unit or chunk by chunk.

    Args:
        units: units of the model, padded for the ranks.
        settings: schedule, accumulation steps and limits on gathering.
        trained: count trained parameters, and not frozen ones alone.
        counted: function that tells which units count.
    """
    if settings.chunks_take_turns:
        return gathered_by_chunk(units, settings.gather, trained=trained, counted=counted)
    return gathered_numel(units, settings.accumulation_steps, settings.gather, trained=trained, counted=counted)


def gathered_numel(
    units: Sequence[PaddedUnit],
    micro_steps: int,
    budgets: GatherBudgets | None = None,
    *,
    trained: bool = True,
    frozen: bool = True,
    counted: Counted = all_units,
) -> int:
    """Returns the elements that stage 3 gathers in one optimizer step: units in order forward, then backward.

    What a slot still holds from the use before is not gathered again: the last units of forward are the first of
    backward, and the first ones of backward's end those of the next micro step. After the update frozen parameters are
    still there, and what stays is gathered once. Backward does not come to what lies before the first module that
    trains something, unless something outside of all units' modules does so too, which no plan can know.

    Args:
        units: units of the model, padded for the ranks.
        micro_steps: forwards and backwards in the step.
        budgets: limits from the config on what stays gathered, in elements; None for the usual ones.
        trained: count trained parameters.
        frozen: count frozen ones.
        counted: function that tells which units count.
    """
    gathered = gathered_units(units, budgets or GatherBudgets())
    cells = list(zip(gathered.plan.cells, gathered.plan.slots.slot_of, strict=True))
    first = next((number for number, unit in enumerate(gathered.units) if unit.trains), 0)
    backward = [number for number, (cell, _) in enumerate(cells) if cell.unit >= first]
    holds: dict[int, tuple[int, bool]] = {}  # by slot: the cell, and whether its trained part is the present one
    totals: list[int] = []
    # From the second micro step on, every one is like the one before; the first step is not like those after it.
    for micro_step in (*range(min(micro_steps, 2)), *range(min(micro_steps, 2))):
        if micro_step == 0:
            totals.clear()
            holds = {slot: (cell, False) for slot, (cell, _) in holds.items()}
        total = 0
        for number in (*range(len(cells)), *reversed(backward)):
            cell, slot = cells[number]
            if holds.get(slot) == (number, True):
                continue
            unit = gathered.units[cell.unit]
            there = slot in holds and holds[slot][0] == number
            if counted(unit):
                total += unit.padded * (cell.trained and trained)
                total += unit.frozen_padded * (cell.frozen and frozen and not there)
            holds[slot] = (number, True)
        totals.append(total)
    return totals[0] + totals[-1] * (micro_steps - 1)


def gathered_by_chunk(
    units: Sequence[PaddedUnit], budgets: GatherBudgets, *, trained: bool = True, counted: Counted = all_units
) -> int:
    """Returns the elements that a pipeline stage gathers in one optimizer step where its chunks take turns.

    Each chunk is gathered for all of its forwards and again for all of its backwards, which take chunks the other way
    round: what its slots still hold is not gathered again. What stays is gathered once.

    Args:
        units: units of the stage, padded for the ranks.
        budgets: limits from the config on what stays gathered, in elements.
        trained: count trained parameters.
        counted: function that tells which units count.
    """
    gathered = gathered_units(units, budgets, chunks_take_turns=True)
    cells = list(zip(gathered.plan.cells, gathered.plan.slots.slot_of, strict=True))
    forward = range(max(unit.chunk for unit in units) + 1)
    holds: dict[int, int] = {}  # by slot: the cell
    total = 0
    for chunk in (*forward, *reversed(forward)):
        for number, (cell, slot) in enumerate(cells):
            unit = gathered.units[cell.unit]
            if unit.chunk != chunk or holds.get(slot) == number:
                continue
            if counted(unit):
                total += unit.padded * (cell.trained and trained) + unit.frozen_padded * cell.frozen
            holds[slot] = number
    return total
