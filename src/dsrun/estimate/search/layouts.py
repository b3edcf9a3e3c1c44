"""Layouts of a run that are possible: ranks that share a layer, pipeline stages, their chunks and schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.changes import Free, with_axes
from dsrun.pipeline_schedules.generate import ScheduleName

#: More chunks a rank than these send more than they save.
_MOST_CHUNKS = 8


def divisors(number: int) -> list[int]:
    """Returns the divisors of a whole number above 0, the largest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)}, reverse=True)


def tensor_sizes(model: ModelSize, settings: RunSettings, machine: Machine, *, over_hosts: bool = False) -> list[int]:
    """Returns how many ranks can share a layer, that of the settings among them, ascending.

    Whole heads and an even part of the MLP each; heads of keys and values may be on several ranks. What a layer's ranks
    send each other in every block goes over the network where they are on several hosts. That of the settings need not
    be even, but has to be one that heads can be dealt to.

    Args:
        model: the model; without the shape of its layers nothing else can be told to be possible.
        settings: settings that are asked about.
        machine: ranks of the job and of a host.
        over_hosts: whether ranks that share a layer may be on several hosts.
    """
    shape, asked = model.architecture, settings.tensor_parallel
    if shape is None:
        return [asked]
    found = {asked} if shape.deals_heads_to(asked) else set[int]()
    for size in divisors(machine.ranks):
        inside = over_hosts or machine.ranks_per_host % size == 0
        is_even = shape.heads % size == 0 and shape.intermediate % size == 0
        if inside and is_even and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0):
            found.add(size)
    return sorted(found)


def stage_counts(model: ModelSize, settings: RunSettings, machine: Machine) -> list[int]:
    """Returns how many pipeline stages there can be, that of the settings among them, ascending."""
    blocks = 1 if model.architecture is None else model.architecture.layers
    return sorted({settings.stages, *(count for count in divisors(machine.ranks) if count <= blocks)})


def layouts(
    model: ModelSize,
    settings: RunSettings,
    machine: Machine,
    *,
    free: Iterable[Free],
    over_hosts: bool = False,
) -> Iterator[RunSettings]:
    """Yields the settings in every layout that ranks, heads and blocks divide into, the simplest first.

    Args:
        model: the model.
        settings: settings that are asked about.
        machine: machine to train on.
        free: parts of the settings that may differ.
        over_hosts: whether ranks that share a layer may be on several hosts.
    """
    for stages in stage_counts(model, settings, machine) if "pipe" in free else [settings.stages]:
        sizes = tensor_sizes(model, settings, machine, over_hosts=over_hosts)
        for tensor in sizes if "tensor" in free else [settings.tensor_parallel]:
            cut = with_axes(settings, tensor=tensor, stages=stages)
            if cut.fits_ranks(machine.ranks):
                if "schedule" in free:
                    yield from _scheduled(model, settings, cut)
                elif cut.stages == settings.stages or has_blocks(model, cut):
                    yield cut


def has_blocks(model: ModelSize, settings: RunSettings) -> bool:
    """Whether each chunk of a layout has a block."""
    blocks = 1 if model.architecture is None else model.architecture.layers
    return settings.stages * settings.chunks_per_rank <= blocks


def _scheduled(model: ModelSize, asked: RunSettings, cut: RunSettings) -> Iterator[RunSettings]:
    if cut.stages in (1, asked.stages):
        yield cut
    if cut.stages == 1:
        return
    blocks = 1 if model.architecture is None else model.architecture.layers
    for schedule, chunks in _schedules(blocks // cut.stages):
        made = replace(cut, schedule=schedule, chunks_per_rank=chunks, partition="cost")
        if made != cut or cut.stages != asked.stages:
            yield made


def _schedules(blocks: int) -> Iterator[tuple[ScheduleName, int]]:
    """Yields the schedules, with their chunks a rank, for stages of so many blocks; the simplest first."""
    yield "1f1b", 1
    yield "zero_bubble", 1
    if blocks >= 2:
        yield "zbv", 2
    for chunks in sorted(divisors(blocks)) if blocks else ():
        if 1 < chunks <= _MOST_CHUNKS:
            yield "interleaved", chunks
            yield "breadth_first", chunks
