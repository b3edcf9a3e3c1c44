"""The whole prediction of one run: lines of memory by tier, traffic, floors, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from dsrun.estimate.memory.checkpoint_copy import checkpoint_copy_bytes
from dsrun.estimate.memory.model_state import StateBytes, pad_units, state_bytes, zero_paper_bytes
from dsrun.estimate.memory.tiers import CUDA_PROCESS_BYTES, Tier, memory_tiers, shared_by_need
from dsrun.estimate.model.activations import activation_bytes
from dsrun.estimate.model.attention import AttentionEstimate, attention_estimate
from dsrun.estimate.model.stages import StageSize, cut_into_stages
from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.axes import axis_traffic
from dsrun.estimate.time.pipeline import PipelineEstimate, pipeline_estimate
from dsrun.estimate.time.steps import (
    Floor,
    StepFloor,
    StepTraffic,
    floors,
    model_flops,
    most_traffic,
    step_floor,
    step_traffic,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run needs.

    Attributes:
        model: the model.
        settings: settings of the run.
        machine: machine on which the run takes place.
        state: model state of a rank of the fullest pipeline stage, wherever it lies.
        tiers: memory of one rank of the fullest pipeline stage.
        host_bytes: host memory of all ranks of the host that needs the most.
        host_state_bytes: part of such a host's memory that model and config alone tell.
        save_bytes: bytes of host memory that all ranks of such a host take in addition from their first save on.
        traffic: bytes and arithmetic of one optimizer step, of a rank with the most of each.
        paths: shortest time of each path.
        step: shortest time of a step.
        attention: attention of one block; None where the layers are not known.
        pipeline: stages and what their schedule costs; None for one stage.
        fullest: number of the fullest pipeline stage.
        stage_bytes: bytes of a rank of each pipeline stage, where it computes.
    """

    model: ModelSize
    settings: RunSettings
    machine: Machine
    state: StateBytes
    tiers: tuple[Tier, ...]
    host_bytes: int
    host_state_bytes: int
    save_bytes: int
    traffic: StepTraffic
    paths: tuple[Floor, ...]
    step: StepFloor
    attention: AttentionEstimate | None = None
    pipeline: PipelineEstimate | None = None
    fullest: int = 0
    stage_bytes: tuple[int, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether everything fits; None where that cannot be told."""
        answers = [tier.fits for tier in self.limiting_tiers]
        if False in answers or self.host_fits is False:
            return False
        return None if None in answers else True

    @property
    def limiting_tiers(self) -> list[Tier]:
        """Tiers that decide whether it fits: not the processes' own memory on hosts of which nothing is known."""
        bare = CUDA_PROCESS_BYTES
        return [
            tier for tier in self.tiers if tier.lines and (tier.limit_bytes is not None or tier.total_bytes != bare)
        ]

    @property
    def host_fits(self) -> bool | None:
        """Whether all ranks of a host fit into its memory."""
        limit = self.machine.host_memory_bytes
        if limit is None:
            return None
        return self.host_bytes <= limit

    @property
    def save_fits(self) -> bool | None:
        """Whether a save's copies fit into a host's memory, too; None where that cannot be told."""
        limit = self.machine.host_memory_bytes
        return None if limit is None else self.host_bytes + self.save_bytes <= limit

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        data_ranks = self.settings.ranks_of("batch", self.machine.ranks)
        samples = self.settings.micro_batch * self.settings.accumulation_steps * data_ranks
        return samples * self.settings.sequence

    @property
    def zero_paper_bytes(self) -> int:
        """Model state of a rank as the ZeRO paper counts it, wherever it lies."""
        ranks = self.settings.ranks_of("shard", self.machine.ranks)
        model = self.model
        return zero_paper_bytes(model.trained_numel, self.settings, ranks=ranks, frozen_numel=model.frozen_numel)

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s of a rank that are the model's own, recomputation left out; None where no time is known."""
        if self.step.seconds is None:
            return None
        return model_flops(self.model, self.settings, again=0.0) / self.settings.stages / self.step.seconds

    @property
    def unknown_speeds(self) -> tuple[str, ...]:
        """Names of the speeds, as `Speeds` has them, without which the time of a path is not known."""
        return tuple(dict.fromkeys(name for floor in self.paths for name in floor.missing))

    def tier(self, name: str) -> Tier:
        """Returns a tier by its name."""
        return next(tier for tier in self.tiers if tier.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageNeeds:
    """What one rank of a pipeline stage needs, and does in a step."""

    state: StateBytes
    tiers: tuple[Tier, ...]
    copied: int
    traffic: StepTraffic

    @property
    def host_bytes(self) -> int:
        return sum(tier.total_bytes for tier in self.tiers if tier.is_host)

    @property
    def host_state_bytes(self) -> int:
        return sum(tier.exact_bytes for tier in self.tiers if tier.is_host)


@dataclass(frozen=True, slots=True)
class _StageLoad:
    """What a stage has to hold and do: live micro batches, FLOPs and bytes sent in a step."""

    stage: StageSize
    live: float
    flops: float
    sent: int


def _heaviest(loads: list[_StageLoad]) -> list[_StageLoad]:
    """Returns the loads of a search: of stages with the same layers each is told with the most of all of them."""
    most: dict[StageSize, _StageLoad] = {}
    for load in loads:
        known = most.get(load.stage, load)
        live, flops, sent = max(known.live, load.live), max(known.flops, load.flops), max(known.sent, load.sent)
        most[load.stage] = _StageLoad(load.stage, live, flops, sent)
    return [most[load.stage] for load in loads]


def predict(model: ModelSize, settings: RunSettings, machine: Machine, *, exact: bool = True) -> Prediction:
    """Predicts a run.

    Args:
        model: model to train.
        settings: settings of the run.
        machine: machine to train on; its number of ranks is divisible by the parallel sizes of `settings`.
        exact: whether a pipeline's schedule is simulated; else its formula tells what ranks wait, and stages with the
            same layers are taken for the fullest of them, for a search.

    Raises:
        ConfigError: the model cannot be cut into the pipeline stages of `settings`, or its heads not be dealt to the
            ranks that share layers.
    """
    stages = cut_into_stages(model, settings)
    pipeline = pipeline_estimate(stages, settings, exact=exact)
    attention = None if model.architecture is None else attention_estimate(model.architecture, settings, machine)
    beyond = 0 if attention is None else attention.beyond_block
    live = [1.0] if pipeline is None else [stage.live for stage in pipeline.stages]
    sent = [0] if pipeline is None else [stage.sent_bytes for stage in pipeline.stages]
    again = [None] if pipeline is None else [stage.again for stage in pipeline.stages]
    is_fused = attention is not None and attention.choice.kernel != "math"
    flops = [
        model_flops(model, settings, stage=stage, again=more, is_fused=is_fused)
        for stage, more in zip(stages, again, strict=True)
    ]
    loads = [_StageLoad(*load) for load in zip(stages, live, flops, sent, strict=True)]
    if not exact:
        loads = _heaviest(loads)
    computed = {load: _needs(load, settings, machine, beyond=beyond) for load in dict.fromkeys(loads)}
    needs = [computed[load] for load in loads]
    # Where a rank computes comes first among its tiers.
    fullest = max(range(len(needs)), key=lambda number: (needs[number].tiers[0].total_bytes, -number))
    traffic = most_traffic([need.traffic for need in needs])
    paths = floors(traffic, settings, machine, stretch=1.0 if pipeline is None else pipeline.stretch)
    on_hosts = _stages_of_hosts(machine.ranks, machine.ranks_per_host, len(needs))

    def most_on_host(bytes_of: Callable[[_StageNeeds], int]) -> int:
        return max(sum(count * bytes_of(needs[stage]) for stage, count in on) for on in on_hosts)

    host_bytes = most_on_host(lambda need: need.host_bytes)
    return Prediction(
        model=model,
        settings=settings,
        machine=machine,
        state=needs[fullest].state,
        tiers=shared_by_need(needs[fullest].tiers, needs[fullest].host_bytes, host_bytes, machine.ranks_per_host),
        host_bytes=host_bytes,
        host_state_bytes=most_on_host(lambda need: need.host_state_bytes),
        save_bytes=most_on_host(lambda need: need.copied),
        traffic=traffic,
        paths=paths,
        step=step_floor(paths),
        attention=attention,
        pipeline=pipeline,
        fullest=fullest,
        stage_bytes=tuple(need.tiers[0].total_bytes for need in needs),
    )


@cache
def _stages_of_hosts(ranks: int, ranks_per_host: int, stages: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns (stage, ranks of it) of each kind of host: ranks of a stage are neighbours."""
    each = ranks // stages
    hosts = (range(first, min(first + ranks_per_host, ranks)) for first in range(0, ranks, ranks_per_host))
    return tuple(dict.fromkeys(tuple(Counter(rank // each for rank in host).items()) for host in hosts))


def _needs(load: _StageLoad, settings: RunSettings, machine: Machine, *, beyond: int) -> _StageNeeds:
    model, stage, live = load.stage.model, load.stage, load.live
    shard_ranks = settings.ranks_of("shard", machine.ranks)
    units = pad_units(model.units, shard_ranks, tensor_parallel=settings.tensor_parallel, by_block=settings.stages > 1)
    frozen = -(-model.frozen_numel // settings.tensor_parallel)
    state = state_bytes(units, settings, frozen_numel=frozen)
    kept = None
    if model.architecture is not None:
        kept = activation_bytes(model.architecture, settings, attention=beyond, live=live, has_head=stage.has_head)
    tiers = memory_tiers(state, kept, units, settings, machine)
    axes = axis_traffic(stage, units, settings, machine, boundary_bytes=load.sent)
    traffic = step_traffic(model, units, settings, machine, axes=axes)
    return _StageNeeds(
        state=state,
        tiers=tiers,
        copied=checkpoint_copy_bytes(units, settings, frozen_numel=frozen, ranks=shard_ranks),
        traffic=replace(traffic, flops=load.flops),
    )
