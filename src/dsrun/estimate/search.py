"""Other settings of the same run: every stage and offload, the fastest that fits, the nearest that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsrun.config.axes import divides
from dsrun.config.knob import Section, Status
from dsrun.config.sections.offload import OffloadOptimizer, OffloadParam
from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings, Tier
from dsrun.pipeline_schedules.generate import ScheduleName

#: What offloading puts away: optimizer, parameters.
_OFFLOADS: tuple[tuple[Tier, Tier], ...] = (
    ("none", "none"),
    ("cpu", "none"),
    ("cpu", "cpu"),
    ("nvme", "none"),
    ("nvme", "nvme"),
)
_STAGES = (0, 1, 2, 3)
#: Stage 3 is 2 in a pipeline, but where chunks take turns.
_STAGES_OF_PIPELINES = (0, 1, 2)
#: More chunks a rank than these send more than they save.
_MOST_CHUNKS = 8
_OFFLOADING: tuple[tuple[str, type[Section]], ...] = (
    ("zero_optimization.offload_optimizer.device", OffloadOptimizer),
    ("zero_optimization.offload_param.device", OffloadParam),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings with what they come to.

    Attributes:
        prediction: prediction for these settings.
        changes: (key, value) of what differs from the settings asked about, in the words of the config or a flag.
    """

    prediction: Prediction
    changes: tuple[tuple[str, int | str | bool], ...]


def what_if(model: ModelSize, settings: RunSettings, machine: Machine) -> list[Prediction]:
    """Predicts every stage with every offload; parameters are offloaded at stage 3 only, nothing at stage 0."""
    found: list[Prediction] = []
    for stage in _stages(settings):
        for optimizer, param in _OFFLOADS:
            if (stage == 0 and optimizer != "none") or (stage < 3 and param != "none"):
                continue
            changed = with_offload(replace(settings, stage=stage), optimizer, param)
            found.append(predict(model, changed, machine))
    return found


def _stages(settings: RunSettings) -> tuple[int, ...]:
    return _STAGES if settings.stages == 1 or settings.chunks_take_turns else _STAGES_OF_PIPELINES


def with_offload(settings: RunSettings, optimizer: Tier, param: Tier) -> RunSettings:
    """Returns the settings with another offload, and the keys of it that this version refuses."""
    others = tuple(key for key in settings.planned if ".offload_" not in key)
    tiers = (optimizer, param)
    asked = tuple(key for (key, section), tier in zip(_OFFLOADING, tiers, strict=True) if _is_planned(section, tier))
    return replace(settings, offload_optimizer=optimizer, offload_param=param, planned=(*others, *asked))


def _is_planned(section: type[Section], tier: Tier) -> bool:
    if tier == "none":
        return False
    return section.status_of("device") is Status.PLANNED or tier in section.knob_of("device").planned


def fastest(model: ModelSize, settings: RunSettings, machine: Machine, *, pipelines: bool = True) -> Choice | None:
    """Returns the fastest settings that fit and that this version runs; None where there are none.

    Stage and micro batch are free, and with `pipelines` the number of pipeline stages, their chunks and the schedule;
    samples of an optimizer step stay as they are. Where no speed is known, the order is that of bytes on the wire. Of
    equals, fewer pipeline stages, the lower stage and the larger micro batch.

    Args:
        model: the model.
        settings: settings that are asked about.
        machine: machine to train on.
        pipelines: whether other pipelines than that of the settings are tried.
    """
    base = with_offload(settings, "none", "none")
    samples = settings.micro_batch * settings.accumulation_steps
    tried: list[Choice] = []
    for cut in _pipelines(model, base, machine) if pipelines else (base,):
        # As many samples of each pipeline more as there are fewer pipelines.
        here = samples * cut.stages // settings.stages
        for stage in _stages(cut):
            for micro in divisors(here):
                changed = replace(cut, stage=stage, micro_batch=micro, accumulation_steps=here // micro)
                if _takes(changed):
                    tried.append(_choice(model, settings, changed, machine))
    fitting = [choice for choice in tried if choice.prediction.fits is not False and choice.prediction.settings.can_run]
    best = min(fitting, key=_slowness, default=None)
    # A search has many pipelines to price, by their formula; the one that is chosen is simulated.
    return best if best is None else replace(best, prediction=predict(model, best.prediction.settings, machine))


def _pipelines(model: ModelSize, settings: RunSettings, machine: Machine) -> Iterator[RunSettings]:
    """Yields the settings with one stage, and with each pipeline that ranks and blocks divide into."""
    blocks = 1 if model.architecture is None else model.architecture.layers
    others = {name: size for name, size in settings.axis_sizes.items() if name != "pipe"}
    for stages in sorted(divisors(machine.ranks)):
        axes = {**others, "pipe": stages}
        if stages > blocks or not divides(machine.ranks, axes):
            continue
        kept = replace(settings, axis_sizes=axes)
        if stages == settings.stages:
            yield kept
        if stages == 1:
            if settings.stages > 1:
                yield replace(kept, schedule="1f1b", chunks_per_rank=1, partition="cost", once_an_update=False)
            continue
        several = replace(kept, partition="cost", once_an_update=True)
        for schedule, chunks in _schedules(blocks // stages):
            made = replace(several, schedule=schedule, chunks_per_rank=chunks)
            if made != kept:
                yield made


def _schedules(blocks: int) -> Iterator[tuple[ScheduleName, int]]:
    """Yields the schedules, with their chunks a rank, for stages of so many blocks; the simplest first."""
    yield "1f1b", 1
    yield "zero_bubble", 1
    if blocks >= 2:
        yield "zbv", 2
    for chunks in sorted(divisors(blocks)):
        if 1 < chunks <= _MOST_CHUNKS:
            yield "interleaved", chunks
            yield "breadth_first", chunks


def _takes(settings: RunSettings) -> bool:
    """Whether the schedule takes that many micro batches."""
    return settings.schedule != "interleaved" or settings.accumulation_steps % settings.stages == 0


def _slowness(choice: Choice) -> tuple[float, int, int, int, int, int]:
    prediction = choice.prediction
    chosen = prediction.settings
    seconds = prediction.step.seconds
    # Floors that differ by less than one part in a thousand are equal.
    rounded = 0.0 if seconds is None else float(f"{seconds:.3g}")
    network = prediction.traffic.network_bytes if seconds is None else 0
    return rounded, network, chosen.stages, chosen.chunks_per_rank, chosen.stage, -chosen.micro_batch


def nearest(
    model: ModelSize, settings: RunSettings, machine: Machine, *, most_ranks: int, count: int = 3
) -> list[Choice]:
    """Returns settings that fit and that this version runs, those with the fewest and smallest changes first.

    Args:
        model: the model.
        settings: settings that do not fit.
        machine: machine on which the settings do not fit.
        most_ranks: ranks there could be on one host.
        count: largest number of choices to return.
    """
    base = with_offload(settings, "none", "none")
    found: list[tuple[tuple[float, ...], Choice]] = []
    for stage in _stages(base):
        for compute in sorted({base.compute_bytes, 2}, reverse=True):
            for micro in divisors(base.micro_batch):
                for ranks in _ranks(machine.ranks, most_ranks):
                    steps = base.accumulation_steps * base.micro_batch // micro
                    changed = replace(
                        base, stage=stage, compute_bytes=compute, micro_batch=micro, accumulation_steps=steps
                    )
                    if not changed.fits_ranks(ranks) or not _takes(changed):
                        continue
                    choice = _choice(model, settings, changed, machine.with_ranks(ranks), asked_ranks=machine.ranks)
                    if choice.changes and changed.can_run and choice.prediction.fits is not False:
                        distance = (
                            len(choice.changes),
                            # Of single changes, the stage costs least: results stay the same, bit for bit.
                            compute != settings.compute_bytes,
                            ranks != machine.ranks,
                            abs(stage - settings.stage),
                            settings.micro_batch / micro,
                            abs(ranks - machine.ranks),
                        )
                        found.append((distance, choice))
    found.sort(key=lambda item: item[0])
    # One of each kind comes first: who cannot change the ranks is not helped by three numbers of them.
    seen: set[frozenset[str]] = set()
    first: list[Choice] = []
    others: list[Choice] = []
    for _, choice in found:
        kind = frozenset(key for key, _ in choice.changes)
        (others if kind in seen else first).append(choice)
        seen.add(kind)
    return [*first, *others][:count]


def _choice(
    model: ModelSize,
    asked: RunSettings,
    changed: RunSettings,
    machine: Machine,
    *,
    asked_ranks: int | None = None,
) -> Choice:
    return Choice(predict(model, changed, machine, exact=False), tuple(_changes(asked, changed, machine, asked_ranks)))


def _changes(
    asked: RunSettings, changed: RunSettings, machine: Machine, asked_ranks: int | None
) -> Iterator[tuple[str, int | str | bool]]:
    if changed.stage != asked.stage:
        yield "zero_optimization.stage", changed.stage
    if changed.stages != asked.stages:
        yield "pipeline.stages", changed.stages
    if changed.stages > 1 and changed.schedule != asked.schedule:
        yield "pipeline.schedule", changed.schedule
    if changed.stages > 1 and changed.chunks_per_rank != asked.chunks_per_rank and changed.schedule != "zbv":
        yield "pipeline.virtual_stages", changed.chunks_per_rank
    if changed.compute_bytes != asked.compute_bytes:
        yield "bf16.enabled", True
    if changed.offload_optimizer != asked.offload_optimizer:
        yield _OFFLOADING[0][0], changed.offload_optimizer
    if changed.offload_param != asked.offload_param:
        yield _OFFLOADING[1][0], changed.offload_param
    if (changed.micro_batch, changed.accumulation_steps) != (asked.micro_batch, asked.accumulation_steps):
        yield "train_micro_batch_size_per_gpu", changed.micro_batch
        yield "gradient_accumulation_steps", changed.accumulation_steps
    if asked_ranks is not None and machine.ranks != asked_ranks:
        yield "-n", machine.ranks


def divisors(number: int) -> list[int]:
    """Returns the divisors of a whole number above 0, the largest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)}, reverse=True)


def _ranks(asked: int, most: int) -> list[int]:
    """Ranks to try: as asked, and powers of two up to what one host has."""
    counts = {asked}
    power = 1
    while power <= most:
        counts.add(power)
        power *= 2
    return sorted(counts | ({most} if most >= 1 else set()))
