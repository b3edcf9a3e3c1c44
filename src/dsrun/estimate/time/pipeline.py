"""What a pipeline's schedule costs: ranks that wait, micro batches that are held, bytes between stages.

Schedules are made and priced in `dsrun.pipeline_schedules`; which blocks a stage has is decided in `model/stages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from dsrun.estimate.model.activations import forwards_again
from dsrun.estimate.model.stages import StageSize
from dsrun.estimate.run.settings import RunSettings
from dsrun.pipeline_schedules.actions import Schedule
from dsrun.pipeline_schedules.formulas import bubble_ratio, half_interleaved_efficiency
from dsrun.pipeline_schedules.generate import ScheduleName, make_schedule
from dsrun.pipeline_schedules.live import most_live
from dsrun.pipeline_schedules.long_batches import step_seconds
from dsrun.pipeline_schedules.simulate import Costs

#: Backward of a block, in forwards: gradients of the inputs, gradients of the weights.
_INPUTS, _WEIGHTS = 1.0, 1.0
#: Schedules under which the micro batches that a rank holds do not grow with those of a batch.
_BOUNDED: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero_bubble", "zbv")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One stage of a pipeline.

    Attributes:
        blocks: blocks of each of its chunks.
        has_embedding: whether it looks tokens up.
        has_head: whether it computes logits and loss.
        cost: part of the work of one micro batch.
        parameters: parameters that it has.
        live: micro batches whose activations it holds at once, in parts of its blocks.
        again: forwards of its blocks that are made beyond the first one.
        sent_bytes: bytes that a rank of it sends to neighbouring stages in one update.
    """

    blocks: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    cost: float
    parameters: int
    live: float
    again: float
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEstimate:
    """A pipeline in one update.

    Attributes:
        schedule: name of the schedule.
        chunks_per_rank: chunks of blocks on each stage.
        micros: micro batches of an update.
        stages: its stages, from the inputs on.
        bubble_formula: part of a step that ranks wait, were all chunks alike; None where there is no formula.
        bubble: part of a step that ranks wait, all stages together, by the schedule with the costs of its chunks.
        stretch: factor of the time of a step to the time that the costliest stage computes.
        imbalance: part that the costliest stage computes beyond the mean of all stages.
    """

    schedule: ScheduleName
    chunks_per_rank: int
    micros: int
    stages: tuple[StageEstimate, ...]
    bubble_formula: float | None
    bubble: float
    stretch: float
    imbalance: float

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank of the stage with the most sends in one update."""
        return max(stage.sent_bytes for stage in self.stages)

    @property
    def efficiency_interleaved(self) -> float | None:
        """M*P/(M*P + 2(P-1)): part of a step that interleaved 1F1B with P/2 chunks a rank computes.

        None where P/2 is no whole number, or M no multiple of P, so that there is no such schedule.
        """
        stages = len(self.stages)
        if stages % 2 or self.micros % stages:
            return None
        return half_interleaved_efficiency(stages, self.micros)


def pipeline_estimate(
    stages: Sequence[StageSize], settings: RunSettings, *, exact: bool = True
) -> PipelineEstimate | None:
    """Returns what the schedule costs; None for one stage.

    Args:
        stages: stages of the model.
        settings: schedule, micro batches and what is computed again.
        exact: whether the schedule is simulated; else what ranks wait is told by the formula, for a search.
    """
    if len(stages) == 1:
        return None
    name, virtual, micros = settings.schedule, settings.chunks_per_rank, settings.accumulation_steps
    rows = _rows(stages, settings)
    again = max(row.again for row in rows)
    ratio = _ratio(name, len(stages), micros, virtual, again)
    # Blocks alone are computed again; the output layer's part of the last stage is not.
    agains = [[part * row.again for part in stage.block_costs] for stage, row in zip(stages, rows, strict=True)]
    works = [(row.cost * (1 + _INPUTS + _WEIGHTS) + sum(more)) * micros for row, more in zip(rows, agains, strict=True)]
    busiest, busy = max(works), sum(works)
    if exact or ratio is None:
        costs = _by_chunk(name, micros, virtual, [stage.costs for stage in stages])
        seconds = _seconds(name, len(stages), micros, virtual, costs, _by_chunk(name, micros, virtual, agains))
    else:
        seconds = busiest * (1 + ratio)
    return PipelineEstimate(
        schedule=name,
        chunks_per_rank=virtual,
        micros=micros,
        stages=rows,
        bubble_formula=None if ratio is None else ratio / (1 + ratio),
        bubble=1 - busy / (len(stages) * seconds),
        stretch=seconds / busiest,
        imbalance=busiest * len(stages) / busy - 1,
    )


def schedule_of(settings: RunSettings) -> Schedule:
    """Returns the schedule of one update."""
    return make_schedule(
        settings.schedule,
        ranks=settings.stages,
        micros=settings.accumulation_steps,
        virtual=settings.chunks_per_rank,
    )


def _ratio(name: ScheduleName, ranks: int, micros: int, virtual: int, again: float) -> float | None:
    """Returns the time that ranks wait over the time that they compute, were all chunks alike."""
    if (name == "zbv" and again) or (name == "zero_bubble" and micros < ranks):
        return None  # there is no closed form
    inputs = _INPUTS + again
    return bubble_ratio(name, ranks=ranks, micros=micros, virtual=virtual, input_grads=inputs, weight_grads=_WEIGHTS)


def _by_chunk(name: ScheduleName, micros: int, virtual: int, of_stages: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns numbers of each stage's chunks in the order of the chunks, from the inputs on."""
    ranks = len(of_stages)
    schedule = _made(name, ranks, min(micros, ranks) if name != "interleaved" else ranks, virtual)
    found = [0.0] * schedule.chunks
    for rank, numbers in enumerate(of_stages):
        for chunk, number in zip(schedule.chunks_of(rank), numbers, strict=True):
            found[chunk] = number
    return tuple(found)


@cache
def _made(name: ScheduleName, ranks: int, micros: int, virtual: int) -> Schedule:
    return make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)


@cache
def _seconds(
    name: ScheduleName, ranks: int, micros: int, virtual: int, costs: tuple[float, ...], again: tuple[float, ...]
) -> float:
    """Returns how long a step takes, in forwards of the whole model, as are each chunk's own and what is made again."""
    priced = Costs(
        forward=costs,
        input_grads=[cost * _INPUTS + more for cost, more in zip(costs, again, strict=True)],
        weight_grads=[cost * _WEIGHTS for cost in costs],
    )
    return step_seconds(name, priced, ranks=ranks, micros=micros, virtual=virtual)


def _rows(stages: Sequence[StageSize], settings: RunSettings) -> tuple[StageEstimate, ...]:
    count, virtual = len(stages), settings.chunks_per_rank
    micros = settings.accumulation_steps
    # Beyond a few rounds nothing changes, or each micro batch is held; whole rounds, for schedules that take no others.
    enough = min(micros, 4 * count)
    sent = _messages(_made(settings.schedule, count, enough, virtual).rank_of)
    rows: list[StageEstimate] = []
    for rank, stage in enumerate(stages):
        live = _live(settings.schedule, count, enough, virtual, rank, stage.blocks)
        if settings.schedule not in _BOUNDED:
            live = live * micros / enough
        rows.append(
            StageEstimate(
                blocks=stage.blocks,
                has_embedding=stage.has_embedding,
                has_head=stage.has_head,
                cost=stage.cost,
                parameters=stage.model.numel,
                live=live,
                again=forwards_again(stage.model.architecture, settings, live=live),
                sent_bytes=sent[rank] * micros * _boundary_bytes(stage, settings),
            )
        )
    return tuple(rows)


@cache
def _live(name: ScheduleName, ranks: int, micros: int, virtual: int, rank: int, blocks: tuple[int, ...]) -> float:
    """Returns the micro batches that a rank holds at once, in parts of its blocks."""
    return most_live(_made(name, ranks, micros, virtual), rank, blocks) / max(1, sum(blocks))


def _messages(rank_of: Sequence[int]) -> list[int]:
    """Returns the messages that each rank sends of one micro batch: outputs of chunks, gradients of their inputs."""
    sent = [0] * (max(rank_of) + 1)
    for before, behind in pairwise(rank_of):
        if before != behind:
            sent[before] += 1
            sent[behind] += 1
    return sent


def _boundary_bytes(stage: StageSize, settings: RunSettings) -> int:
    shape = stage.model.architecture
    if shape is None:
        return 0
    return settings.tokens_per_micro_step * shape.hidden * (settings.boundary_bytes or settings.compute_bytes)
