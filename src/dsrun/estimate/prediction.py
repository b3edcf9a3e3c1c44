"""The whole prediction of one run: lines of memory by tier, traffic, floors, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from dsrun.choices.gather_plan import LEAVING_COUNT, leaving_numel
from dsrun.estimate.memory.checkpoint_copy import checkpoint_copy_bytes
from dsrun.estimate.memory.host_optimizer import host_optimizer_bytes
from dsrun.estimate.memory.model_state import (
    PaddedUnit,
    StateBytes,
    bytes_off_device,
    pad_units,
    slices_on_drives,
    split_units,
    state_bytes,
    zero_paper_bytes,
)
from dsrun.estimate.memory.restart_copies import memory_copy_bytes
from dsrun.estimate.model.activations import ActivationBytes, activation_bytes
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

_MIB = 1 << 20
_GIB = 1 << 30
#: CUDA's context with the kernels of torch's libraries loaded.
CUDA_CONTEXT_BYTES = 512 * _MIB
#: Buffers of NCCL's channels, for one communicator on one host.
NCCL_BYTES = 512 * _MIB
#: What the caching allocator rounds up and cannot use again, as a share of what it holds.
ALLOCATOR_SHARE = 0.03
#: A Python process that has imported torch: its CPU build, and one that has touched CUDA.
CPU_PROCESS_BYTES = 350 * _MIB
CUDA_PROCESS_BYTES = 1536 * _MIB
#: Extents on NVMe start at multiples of this.
_NVME_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of memory of a rank.

    Attributes:
        name: name of what lies there.
        size_bytes: its bytes; None where they cannot be told.
        is_exact: whether model and config alone tell the bytes; else they depend on the script, torch or the driver.
    """

    name: str
    size_bytes: int | None
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One kind of memory of a rank.

    Attributes:
        name: `GPU`, `CPU pinned`, `CPU` or `NVMe`.
        lines: contents of this memory with their bytes; empty lines are left out.
        limit_bytes: bytes of this memory that a rank may use; None where that is not known.
    """

    name: str
    lines: tuple[Line, ...]
    limit_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that are known."""
        return sum(line.size_bytes or 0 for line in self.lines)

    @property
    def exact_bytes(self) -> int:
        """Bytes that model and config alone tell."""
        return sum(line.size_bytes or 0 for line in self.lines if line.is_exact)

    @property
    def complete(self) -> bool:
        """Whether every line could be told."""
        return all(line.size_bytes is not None for line in self.lines)

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where it cannot be told. Known lines alone can show that it does not."""
        if self.limit_bytes is None:
            return None
        if self.total_bytes > self.limit_bytes:
            return False
        return True if self.complete else None


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
        return sum(tier.total_bytes for tier in self.tiers if tier.name.startswith("CPU"))

    @property
    def host_state_bytes(self) -> int:
        return sum(tier.exact_bytes for tier in self.tiers if tier.name.startswith("CPU"))


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
    on_hosts = _stages_of_hosts(machine, len(needs))

    def most_on_host(bytes_of: Callable[[_StageNeeds], int]) -> int:
        return max(sum(count * bytes_of(needs[stage]) for stage, count in on.items()) for on in on_hosts)

    host_bytes = most_on_host(lambda need: need.host_bytes)
    return Prediction(
        model=model,
        settings=settings,
        machine=machine,
        state=needs[fullest].state,
        tiers=_shared_by_need(needs[fullest], host_bytes, machine.ranks_per_host),
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
def _ranks_of_stages(ranks: int, ranks_per_host: int, stages: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns (stage, ranks) of each kind of host: ranks of a stage are neighbours."""
    each = ranks // stages
    hosts = (range(first, min(first + ranks_per_host, ranks)) for first in range(0, ranks, ranks_per_host))
    return tuple(dict.fromkeys(tuple(Counter(rank // each for rank in host).items()) for host in hosts))


def _stages_of_hosts(machine: Machine, stages: int) -> list[dict[int, int]]:
    """Returns the ranks that a host has of each pipeline stage, for each kind of host."""
    return [dict(on) for on in _ranks_of_stages(machine.ranks, machine.ranks_per_host, stages)]


def _shared_by_need(need: _StageNeeds, host_bytes: int, ranks_per_host: int) -> tuple[Tier, ...]:
    """Returns a rank's memory with the part of the host's that is its own: by what it needs of what all there need."""
    even = need.host_bytes * ranks_per_host == host_bytes
    if even or not host_bytes:
        return need.tiers
    part = need.host_bytes * ranks_per_host / host_bytes
    return tuple(
        replace(tier, limit_bytes=int(tier.limit_bytes * part))
        if tier.limit_bytes is not None and tier.name.startswith("CPU")
        else tier
        for tier in need.tiers
    )


def _needs(load: _StageLoad, settings: RunSettings, machine: Machine, *, beyond: int) -> _StageNeeds:
    model, stage, live = load.stage.model, load.stage, load.live
    shard_ranks = settings.ranks_of("shard", machine.ranks)
    units = pad_units(model.units, shard_ranks, tensor_parallel=settings.tensor_parallel, by_block=settings.stages > 1)
    frozen = -(-model.frozen_numel // settings.tensor_parallel)
    state = state_bytes(units, settings, frozen_numel=frozen)
    kept = None
    if model.architecture is not None:
        kept = activation_bytes(model.architecture, settings, attention=beyond, live=live, has_head=stage.has_head)
    device = _device_lines(state, kept, units, settings)
    pinned, pageable = _host_lines(state, kept, units, settings)
    drives = _nvme_lines(units, settings, kept)
    share = machine.ranks_per_host
    copies = memory_copy_bytes(state, units, settings, ranks_per_host=share, hosts=machine.hosts)
    pageable.append(Line("copies in memory", copies))
    if machine.on_cpu:
        process = [Line("Python and torch", CPU_PROCESS_BYTES, is_exact=False)]
        tiers = [_tier("CPU", [*device, *pinned, *pageable, *process], _part(machine.host_memory_bytes, share))]
    else:
        framework = _overhead(device, ranks=machine.ranks)
        process = [Line("Python, torch and CUDA", CUDA_PROCESS_BYTES, is_exact=False)]
        tiers = [
            _tier("GPU", [*device, *framework], machine.gpu_memory_bytes),
            _tier("CPU pinned", pinned, _part(machine.host_memory_bytes, share)),
            _tier("CPU", [*pageable, *process], _part(machine.host_memory_bytes, share)),
        ]
    tiers.append(_tier("NVMe", drives, _part(machine.nvme_bytes, share)))
    axes = axis_traffic(stage, units, settings, machine, boundary_bytes=load.sent)
    traffic = step_traffic(model, units, settings, machine, axes=axes)
    return _StageNeeds(
        state=state,
        tiers=tuple(tiers),
        copied=checkpoint_copy_bytes(units, settings, frozen_numel=frozen, ranks=shard_ranks),
        traffic=replace(traffic, flops=load.flops),
    )


def _device_lines(
    state: StateBytes, kept: ActivationBytes | None, units: list[PaddedUnit], settings: RunSettings
) -> list[Line]:
    """What lies where the rank computes."""
    away = settings.offload_optimizer != "none"
    hosted = host_optimizer_bytes(units, settings) if away else None
    leaving = 0
    if settings.trained_leave and settings.has_master:
        largest = max((unit.shard for unit in split_units(units, settings).staying), default=0)
        leaving = LEAVING_COUNT * leaving_numel(largest) * settings.compute_bytes
    return [
        Line("parameters", state.parameters - bytes_off_device(units, settings)),
        Line("frozen parameters", state.frozen - (state.frozen_slices if settings.frozen_leave else 0)),
        Line("gather slots", state.gather_slots),
        Line("parameters leaving", leaving),
        Line("gradients", state.gradients),
        Line("gradient buckets", state.gradient_slots),
        Line(
            "gradient sums fp32" if settings.sums_of(1) == 4 else "gradient sums",
            state.gradient_sums if hosted is None else hosted.device_sums,
        ),
        Line("whole gradient sums fp32", state.local_sums),
        Line("optimizer window", 0 if away else state.window),
        Line("master weights", state.masters if hosted is None else hosted.device_masters),
        Line("optimizer states", state.states if hosted is None else hosted.device_states),
        Line("activations", None if kept is None else kept.layers, is_exact=False),
        Line("logits and loss", None if kept is None else kept.logits, is_exact=False),
    ]


def _host_lines(
    state: StateBytes, kept: ActivationBytes | None, units: list[PaddedUnit], settings: RunSettings
) -> tuple[list[Line], list[Line]]:
    """What offloading puts into host memory: page-locked and not.

    Page-locked is what copies touch: 16-bit gradients on their way in, parameters on their way out. Masters and
    moments are read by the processor alone.

    Source: ZeRO-Offload (Ren et al., 2021), section 4; ZeRO-Infinity (Rajbhandari et al., 2021), section 6.
    """
    away = split_units(units, settings).leaving
    largest = max((unit.shard if settings.stage >= 1 else unit.padded for unit in away), default=0)
    compute = settings.compute_bytes
    moved: list[Line] = []
    kept_there: list[Line] = []
    if settings.offload_optimizer != "none":
        hosted = host_optimizer_bytes(units, settings)
        moved.append(Line("gradients on their way", hosted.gradients))
        ring = min(settings.state_buffers, len(away)) * (4 * largest + settings.away_states_of(largest))
        if settings.offload_optimizer == "nvme":
            moved.append(Line("states on their way", ring))
        else:
            # In fp32 the masters themselves are copied to the GPU.
            (kept_there if settings.has_master else moved).append(Line("master weights", hosted.masters))
            kept_there.append(Line("optimizer states", hosted.states))
            (kept_there if settings.has_master else moved).append(Line("second master weights", hosted.second_masters))
            kept_there.append(Line("second optimizer states", hosted.second_states))
        moved.append(Line("parameters on their way", hosted.parameters))
    if settings.frozen_leave and settings.offload_param == "cpu":
        moved.append(Line("parameters", bytes_off_device(units, settings)))
        moved.append(Line("frozen parameters", state.frozen_slices))
    elif settings.frozen_leave:
        slices = slices_on_drives(units, settings)
        moved.append(Line("parameters", slices.staying * compute))
        ring = min(settings.param_buffers, len(slices.away)) * max(slices.away, default=0)
        moved.append(Line("parameters on their way", ring * compute))
    if kept is not None:
        moved.append(Line("activations", kept.on_host, is_exact=False))
    return (moved, kept_there) if settings.pin_memory else ([], [*moved, *kept_there])


def _nvme_lines(units: list[PaddedUnit], settings: RunSettings, kept: ActivationBytes | None) -> list[Line]:
    def total(bytes_of: Callable[[int], int], *, whole: bool) -> int:
        away = split_units(units, settings).leaving
        sizes = (bytes_of(unit.padded if whole else unit.shard) for unit in away)
        return sum(-(-size // _NVME_ALIGN) * _NVME_ALIGN for size in sizes)

    lines: list[Line] = []
    if settings.offload_optimizer == "nvme":
        size = total(lambda numel: 4 * numel + settings.away_states_of(numel), whole=settings.stage < 1)
        lines.append(Line("master weights and states", size))
    if settings.offload_param == "nvme" and settings.frozen_leave:
        sizes = (settings.compute_bytes * numel for numel in slices_on_drives(units, settings).away)
        lines.append(Line("parameters", sum(-(-size // _NVME_ALIGN) * _NVME_ALIGN for size in sizes)))
    if kept is not None:
        lines.append(Line("activations", kept.on_disk, is_exact=False))
    return lines


def _overhead(lines: list[Line], *, ranks: int) -> list[Line]:
    tensors = sum(line.size_bytes or 0 for line in lines)
    return [
        Line("allocator slack", round(tensors * ALLOCATOR_SHARE), is_exact=False),
        Line("CUDA context", CUDA_CONTEXT_BYTES, is_exact=False),
        Line("NCCL buffers", NCCL_BYTES if ranks > 1 else 0, is_exact=False),
    ]


def _tier(name: str, lines: list[Line], limit: int | None) -> Tier:
    return Tier(name=name, lines=tuple(line for line in lines if line.size_bytes != 0), limit_bytes=limit)


def _part(total: int | None, ranks: int) -> int | None:
    return None if total is None else total // ranks
