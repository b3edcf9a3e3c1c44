"""Settings that fit with the fewest changes to those that do not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.bounds import least_bytes
from dsrun.estimate.search.changes import (
    EVERYTHING,
    RECOMPUTATIONS,
    Choice,
    Free,
    changes,
    offloads,
    recomputation_of,
    rounded,
    stage_in,
    stages_of_zero,
    takes_offload,
    with_axes,
    with_offload,
    with_recomputation,
    with_samples,
)
from dsrun.estimate.search.layouts import divisors, has_blocks, stage_counts, tensor_sizes

#: More changes than these at once are another run.
_MOST_CHANGES = 4


def nearest(
    model: ModelSize,
    settings: RunSettings,
    machine: Machine,
    *,
    most_ranks: int,
    free: Collection[Free] = EVERYTHING,
    count: int = 3,
) -> list[Choice]:
    """Returns settings that fit and that this version runs: the fewest things changed first, and of these the fastest.

    Things are the ZeRO stage, the format, the batch, each axis of ranks, recomputation, offload, and the number of
    ranks. Samples of an optimizer step stay, but with other ranks, of which each has as many as before. Paths of
    unknown speed are taken for cautious ones in choosing, and told without.

    Args:
        model: the model.
        settings: settings that do not fit.
        machine: machine on which the settings do not fit.
        most_ranks: ranks there could be on one host; 0 keeps them as they are.
        free: parts of the settings that may differ, beside the format.
        count: largest number of choices to return.
    """
    options = _options(model, settings, machine, most_ranks)
    options = {name: values for name, values in options.items() if name in free or name not in EVERYTHING}
    cautious = machine.with_cautious_speeds()
    found: list[tuple[tuple[float, ...], frozenset[str], Choice]] = []
    for number in range(1, _MOST_CHANGES + 1):
        for names in combinations(options, number):
            for values in product(*(options[name] for name in names)):
                changed = _changed(model, settings, cautious, dict(zip(names, values, strict=True)))
                choice = None if changed is None else _fitting(model, settings, cautious, *changed)
                if choice is not None:
                    found.append(((number, *_distance(settings, machine, choice)), frozenset(names), choice))
        if len({kind for _, kind, _ in found}) >= count:
            break
    found.sort(key=lambda item: item[0])
    # One of each kind comes first: who cannot change the ranks is not helped by three numbers of them.
    seen: set[frozenset[str]] = set()
    first: list[Choice] = []
    others: list[Choice] = []
    for _, kind, choice in found:
        (others if kind in seen else first).append(choice)
        seen.add(kind)
    return [_predicted(model, choice, machine) for choice in [*first, *others][:count]]


def _predicted(model: ModelSize, choice: Choice, machine: Machine) -> Choice:
    """Returns a choice as it is told: pipelines simulated, which the search has priced by their formula."""
    found = choice.prediction
    there = machine.with_ranks(found.machine.ranks)
    return replace(choice, prediction=predict(model, found.settings, there))


def _options(model: ModelSize, settings: RunSettings, machine: Machine, most_ranks: int) -> dict[str, Sequence[Any]]:
    """Returns what each thing can be changed to."""
    known_shape = model.architecture is not None
    is_listed = recomputation_of(settings) in RECOMPUTATIONS
    tiers = (settings.offload_optimizer, settings.offload_param)
    found: dict[str, Sequence[Any]] = {
        "stage": [stage for stage in range(4) if stage != settings.stage],
        "format": [2] if settings.compute_bytes > 2 else [],
        "batch": [micro for micro in divisors(settings.micro_batch) if micro != settings.micro_batch],
        "ranks": [ranks for ranks in _ranks(most_ranks) if ranks != machine.ranks],
        "tensor": [n for n in tensor_sizes(model, settings, machine) if n != settings.tensor_parallel],
        "pipe": [n for n in stage_counts(model, settings, machine) if n != settings.stages],
        "recompute": [one for one in RECOMPUTATIONS if one != recomputation_of(settings)]
        if known_shape and is_listed
        else [],
        "offload": [pair for pair in offloads(machine) if pair != tiers],
    }
    return {name: values for name, values in found.items() if values}


def _changed(
    model: ModelSize, settings: RunSettings, machine: Machine, to: Mapping[str, Any]
) -> tuple[RunSettings, Machine] | None:
    """Returns settings and machine with some things changed; None where that makes no run."""
    ranks = to.get("ranks", machine.ranks)
    there = machine.with_ranks(ranks)
    if not settings.fits_ranks(ranks):
        return None
    samples = settings.micro_batch * settings.accumulation_steps * settings.ranks_of("batch", ranks)
    cut = with_axes(settings, tensor=to.get("tensor", settings.tensor_parallel), stages=to.get("pipe", settings.stages))
    if not cut.fits_ranks(ranks) or ("pipe" in to and not has_blocks(model, cut)):
        return None
    stage = to.get("stage", stage_in(cut, cut.stage))
    cut = replace(cut, compute_bytes=to.get("format", cut.compute_bytes), stage=stage)
    cut = with_recomputation(cut, to["recompute"]) if "recompute" in to else cut
    tiers = to.get("offload", (cut.offload_optimizer, cut.offload_param))
    if cut.stage not in stages_of_zero(cut) or not takes_offload(cut, *tiers):
        return None
    made = with_samples(with_offload(cut, *tiers), samples, to.get("batch", settings.micro_batch), there)
    return None if made is None else (made, there)


def _fitting(
    model: ModelSize, asked: RunSettings, machine: Machine, changed: RunSettings, there: Machine
) -> Choice | None:
    limit = there.gpu_memory_bytes
    if not changed.can_run or (limit is not None and least_bytes(model, changed, there) > limit):
        return None
    prediction = predict(model, changed, there, exact=False)
    if prediction.fits is False:
        return None
    return Choice(prediction, tuple(changes(asked, changed, ranks=there.ranks, asked_ranks=machine.ranks)))


def _distance(asked: RunSettings, machine: Machine, choice: Choice) -> tuple[float, ...]:
    changed, ranks = choice.prediction.settings, choice.prediction.machine.ranks
    seconds = choice.prediction.step.seconds
    return (
        # Of as many changes, those come last that change results.
        changed.compute_bytes != asked.compute_bytes,
        ranks != machine.ranks,
        0.0 if seconds is None else rounded(seconds / choice.prediction.tokens_per_step),
        abs(changed.stage - asked.stage),
        asked.micro_batch / changed.micro_batch,
        abs(ranks - machine.ranks),
    )


def _ranks(most: int) -> Iterator[int]:
    """Yields ranks to try: powers of two up to what one host has."""
    power = 1
    while power < most:
        yield power
        power *= 2
    if most:
        yield most
