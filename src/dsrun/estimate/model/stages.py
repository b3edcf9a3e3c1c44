"""A model cut into pipeline stages: the blocks, the parameters and the part of the work of each.

When a stage does what, and what waits for it, is told in `time/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dsrun.errors import ConfigError
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.units import ModelSize, UnitGroup
from dsrun.estimate.run.settings import RunSettings
from dsrun.pipeline_schedules.generate import ScheduleName, make_schedule
from dsrun.pipeline_schedules.partition import balance, explicit, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSize:
    """What one rank of a pipeline has of the model.

    Attributes:
        model: its part, as a model of its own: units, parameters, and the shape of its blocks.
        blocks: blocks of each of its chunks, from the inputs on.
        costs: part of a micro batch's forward that each of its chunks is of the whole model's.
        block_costs: part that the blocks of each chunk are of it, which recomputation makes again: without the head.
        has_embedding: whether it looks tokens up.
        has_head: whether it computes logits and loss.
        rows: number of rows of its blocks that lie next to each other; chunks can, too.
    """

    model: ModelSize
    blocks: tuple[int, ...]
    costs: tuple[float, ...]
    block_costs: tuple[float, ...]
    has_embedding: bool
    has_head: bool
    rows: int

    @property
    def cost(self) -> float:
        """Part of the work of one micro batch."""
        return sum(self.costs)

    @property
    def block_cost(self) -> float:
        """Part of that work that its blocks are."""
        return sum(self.block_costs)


@dataclass(frozen=True, slots=True)
class _Layers:
    """Units by their place: before the blocks, the blocks one by one, behind them, and what every end may use."""

    before: tuple[UnitGroup, ...]
    blocks: tuple[UnitGroup, ...]
    behind: tuple[UnitGroup, ...]
    loose: tuple[UnitGroup, ...]


#: Numbers of a unit that ranks which share layers have parts of.
_CUT_NUMELS = ("numel", "frozen", "frozen_numel")
#: Cuts that are kept: a search asks for the same ones again and again.
_MOST_CUTS = 1024


def cut_into_stages(model: ModelSize, settings: RunSettings) -> tuple[StageSize, ...]:
    """Returns what each rank of a pipeline has; with one stage, the model.

    Blocks are what is shared out: what lies before them goes with the first one, what lies behind them with the last,
    and what belongs to no module with both ends where embedding and head are tied, else with the last. With more chunks
    than blocks embedding and head are chunks of their own, as the layers of a `PipelineModule` can be. Of units, what
    ranks that share layers hold whole for want of heads is told.

    Args:
        model: the model.
        settings: stages, chunks of each, the way of cutting, and ranks that share a layer.

    Raises:
        ConfigError: the model has fewer blocks than chunks, the bounds are those of another model, or its heads cannot
            be dealt to the ranks that share its layers.
    """
    shape, tensor = model.architecture, settings.tensor_parallel
    if shape is not None and not shape.deals_heads_to(tensor):
        raise ConfigError(
            f"`tensor_parallel.autotp_size` {tensor}: the model has {shape.heads} heads of queries and "
            f"{shape.kv_heads} of keys, which {tensor} ranks cannot share",
            hint=f"use a size that divides {shape.heads}, and is a multiple or a divisor of {shape.kv_heads}",
        )
    model = _in_even_parts(model, settings)
    if settings.stages == 1:
        return (whole_model(model, settings.sequence),)
    how = (settings.schedule, settings.partition, settings.sequence)
    return _cut(model, settings.stages, settings.chunks_per_rank, *how)


def whole_model(model: ModelSize, sequence: int) -> StageSize:
    """Returns the model as the one stage that has everything, whatever its layers are.

    Args:
        model: the model.
        sequence: tokens of a sample.
    """
    shape = model.architecture
    head = 0.0 if shape is None else head_in_blocks(shape, sequence)
    count = 0 if shape is None else shape.layers
    return StageSize(
        model=model,
        blocks=(count,),
        costs=(1.0,),
        block_costs=(count / (count + head) if head else 1.0,),
        has_embedding=True,
        has_head=True,
        rows=1,
    )


@lru_cache(maxsize=_MOST_CUTS)
def _cut(
    model: ModelSize,
    stages: int,
    chunks_per_rank: int,
    schedule: ScheduleName,
    partition: str | tuple[int, ...],
    sequence: int,
) -> tuple[StageSize, ...]:
    settings = RunSettings(
        axis_sizes={"pipe": stages},
        chunks_per_rank=chunks_per_rank,
        schedule=schedule,
        partition=partition,
        sequence=sequence,
    )
    chunks = stages * chunks_per_rank
    layers = _layers(model)
    if chunks > len(layers.blocks) + _ends(layers):
        raise ConfigError(
            f"`pipeline.stages` {stages} with {settings.chunks_per_rank} chunks each: the model has "
            f"{len(layers.blocks)} blocks, and each chunk needs one",
            hint="use fewer stages or `virtual_stages`",
        )
    costs = _costs(model, layers, settings)
    bounds = _bounds(costs, layers, settings, chunks)
    rank_of = _rank_of(settings)
    total = sum(costs)
    parts = [sum(costs[bounds[c] : bounds[c + 1]]) / total for c in range(chunks)]
    head = _head_cost(model, layers) / total
    if bounds[-2] == bounds[-1]:  # the head's cost is told with the last block's
        parts[-1] += head
        parts[max(c for c in range(chunks) if bounds[c] < bounds[c + 1])] -= head
    of_blocks = [*parts[:-1], parts[-1] - head]
    owned = ([c for c in range(chunks) if rank_of[c] == rank] for rank in range(stages))
    return tuple(_stage(model, layers, bounds, own, parts, of_blocks) for own in owned)


def head_in_blocks(shape: Architecture, sequence: int) -> float:
    """Returns how many blocks compute as long as the output layer.

    Args:
        shape: the transformer.
        sequence: tokens of a sample.
    """
    return 2.0 * shape.embedding_numel / _block_cost(shape, sequence)


def _block_cost(shape: Architecture, sequence: int) -> float:
    return 2.0 * shape.block_numel + shape.block_attention_flops(sequence)


def _layers(model: ModelSize) -> _Layers:
    shape = model.architecture
    units = [unit for unit in model.units if unit.has_module]
    loose = tuple(unit for unit in model.units if not unit.has_module)
    at = None if shape is None else _place_of_blocks(units, shape)
    if at is None:  # a run has told units one by one, or there are no blocks that are alike
        each = tuple(replace(unit, count=1) for unit in units for _ in range(unit.count))
        return _Layers((), each, (), loose)
    blocks = (replace(units[at], count=1),) * units[at].count
    return _Layers(tuple(units[:at]), blocks, tuple(units[at + 1 :]), loose)


def _place_of_blocks(units: Sequence[UnitGroup], shape: Architecture) -> int | None:
    """Returns which units are the blocks: as many as those, and of an only one no embedding, of which all is uncut."""
    alike = (n for n, unit in enumerate(units) if unit.has_module and unit.count == shape.layers)
    return next((n for n in alike if not units[n].uncut or units[n].uncut < units[n].numel), None)


def _in_even_parts(model: ModelSize, settings: RunSettings) -> ModelSize:
    """Returns the model with blocks of which the ranks that share them have even parts, as large as the fullest one.

    Where ranks are more than heads of keys, each has all keys' and values' projections, and sums up their gradients
    with the others, as it does those of norms that work on slices of the sequence: these are units together. Where
    heads do not divide, the first ranks have one more, with its queries.
    """
    shape, ranks = model.architecture, settings.tensor_parallel
    at = None if shape is None else _place_of_blocks(model.units, shape)
    if shape is None or at is None or ranks == 1:
        return model
    blocks = model.units[at]
    # A model may be told by its size alone, with the layers of another one.
    numel, part = round(shape.kv_numel * min(1.0, blocks.numel / shape.block_numel)), shape.most_of_block(ranks)
    if ranks <= shape.kv_heads:
        more = part * ranks - shape.most_of_block(1)
        grown = {name: round(getattr(blocks, name) * (1 + more / shape.block_numel)) for name in _CUT_NUMELS}
        blocks = replace(blocks, **grown) if more else blocks
    elif settings.sequence_slices:
        blocks = replace(blocks, uncut=blocks.uncut + numel)
    else:
        blocks = replace(blocks, repeated=numel)
    return replace(model, units=(*model.units[:at], blocks, *model.units[at + 1 :]))


def _costs(model: ModelSize, layers: _Layers, settings: RunSettings) -> list[float]:
    """Returns FLOPs of a token's forward by block, those of the head with the last one; parameters without a shape."""
    shape = model.architecture
    if shape is None or len(layers.blocks) != shape.layers:
        return [float(unit.numel + unit.frozen_numel) for unit in layers.blocks]
    costs = [_block_cost(shape, settings.sequence)] * len(layers.blocks)
    costs[-1] += _head_cost(model, layers)
    return costs


def _head_cost(model: ModelSize, layers: _Layers) -> float:
    """Returns the FLOPs of the output layer for a token; 0 where the shape is not known."""
    shape = model.architecture
    return 0.0 if shape is None or len(layers.blocks) != shape.layers else 2.0 * shape.embedding_numel


def _ends(layers: _Layers) -> int:
    """Returns the ends that can be chunks of their own."""
    return int(bool(layers.before)) + int(bool(layers.behind))


def _bounds(costs: Sequence[float], layers: _Layers, settings: RunSettings, chunks: int) -> Sequence[int]:
    method, count = settings.partition, len(layers.blocks)
    if chunks > count and not isinstance(method, tuple):
        # The ends are as many layers more; balanced or not, nearly every chunk has one.
        first = int(bool(layers.before))
        return [min(max(bound - first, 0), count) for bound in uniform(count + _ends(layers), chunks)]
    if isinstance(method, tuple):
        return explicit(method, count, chunks)
    if method == "parameters":
        numels = [float(unit.numel + unit.frozen_numel) for unit in layers.blocks]
        numels[0] += sum(unit.numel + unit.frozen_numel for unit in layers.before)
        numels[-1] += sum(unit.numel + unit.frozen_numel for unit in layers.behind)
        return balance(numels, chunks)
    return balance(costs, chunks) if method == "cost" else uniform(count, chunks)


def _rank_of(settings: RunSettings) -> tuple[int, ...]:
    """Returns the rank of each chunk under the schedule."""
    stages = settings.stages
    return make_schedule(settings.schedule, ranks=stages, micros=stages, virtual=settings.chunks_per_rank).rank_of


def _stage(
    model: ModelSize,
    layers: _Layers,
    bounds: Sequence[int],
    own: Sequence[int],
    parts: Sequence[float],
    of_blocks: Sequence[float],
) -> StageSize:
    chunks = len(bounds) - 1
    first, last = 0 in own, chunks - 1 in own
    tied = model.architecture is not None and model.architecture.tied
    units = list(layers.before) if first else []
    for number, chunk in enumerate(own):
        units += [replace(block, chunk=number) for block in layers.blocks[bounds[chunk] : bounds[chunk + 1]]]
    units += [replace(unit, chunk=own.index(chunks - 1)) for unit in layers.behind] if last else ()
    for unit in layers.loose:
        placed = replace(unit, chunk=own.index(chunks - 1) if last else 0)
        units += _loose_of_stage(placed, model.architecture, tied=tied, last=last, first=first)
    merged = _merged(units)
    counted = [*layers.before, *layers.blocks, *layers.behind, *layers.loose]
    outside = max(0, model.frozen_numel - sum(unit.frozen_numel * unit.count for unit in counted))
    frozen = sum(unit.frozen_numel * unit.count for unit in merged) + (outside if last else 0)
    spans = [(bounds[chunk], bounds[chunk + 1]) for chunk in own]
    blocks = tuple(end - start for start, end in spans)
    rows = {start for start, end in spans if start < end} - {end for start, end in spans if start < end}
    return StageSize(
        model=replace(
            model,
            units=merged,
            trained_numel=sum(unit.numel * unit.count for unit in merged),
            frozen_numel=frozen,
            architecture=_part_of(model.architecture, sum(blocks)),
        ),
        blocks=blocks,
        costs=tuple(parts[chunk] for chunk in own),
        block_costs=tuple(of_blocks[chunk] for chunk in own),
        has_embedding=first,
        has_head=last,
        rows=len(rows),
    )


def _loose_of_stage(
    unit: UnitGroup, shape: Architecture | None, *, tied: bool, first: bool, last: bool
) -> list[UnitGroup]:
    """Returns what a stage has of a unit that belongs to no module: a tied embedding is both ends' in common."""
    if not tied or shape is None:
        return [unit] if last else []
    shared = min(unit.numel, shape.embedding_numel)
    left = replace(unit, numel=unit.numel - shared, uncut=min(unit.uncut, unit.numel - shared))
    found = [left] if last and left.numel else []
    if first or last:
        found.append(replace(unit, numel=shared, uncut=0, frozen=0, frozen_numel=0, stages=1 if first and last else 2))
    return found


def _merged(units: Sequence[UnitGroup]) -> tuple[UnitGroup, ...]:
    """Returns equal units in a row as one group."""
    merged: list[UnitGroup] = []
    for unit in units:
        if merged and replace(merged[-1], count=unit.count) == unit:
            merged[-1] = replace(merged[-1], count=merged[-1].count + unit.count)
        else:
            merged.append(unit)
    return tuple(merged)


def _part_of(shape: Architecture | None, blocks: int) -> Architecture | None:
    return None if shape is None else replace(shape, layers=blocks)
