"""Memory of a rank by kind: what lies in each, and how much of it a rank may use. Counts nothing by itself.

Model state, activations and copies are counted in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dsrun.choices.gather_plan import LEAVING_COUNT, leaving_numel
from dsrun.estimate.memory.host_optimizer import host_optimizer_bytes
from dsrun.estimate.memory.model_state import (
    PaddedUnit,
    StateBytes,
    bytes_off_device,
    slices_on_drives,
    split_units,
)
from dsrun.estimate.memory.restart_copies import memory_copy_bytes
from dsrun.estimate.model.activations import ActivationBytes
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings

_MIB = 1 << 20
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
    def is_host(self) -> bool:
        """Whether it is memory of the host, which its ranks share."""
        return self.name.startswith("CPU")

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


def memory_tiers(
    state: StateBytes,
    kept: ActivationBytes | None,
    units: list[PaddedUnit],
    settings: RunSettings,
    machine: Machine,
) -> tuple[Tier, ...]:
    """Returns the memory of one rank, where it computes first.

    Args:
        state: model state of the rank.
        kept: bytes kept for backward; None: they are not known.
        units: units of the model, padded for the ranks.
        settings: settings of the run.
        machine: memory of a rank and of a host.
    """
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
    return (*tiers, _tier("NVMe", drives, _part(machine.nvme_bytes, share)))


def shared_by_need(tiers: Sequence[Tier], own_bytes: int, host_bytes: int, ranks_per_host: int) -> tuple[Tier, ...]:
    """Returns a rank's memory with the part of the host's that is its own: by what it needs of what all there need.

    Args:
        tiers: memory of a rank, which may use as much of the host's as any other.
        own_bytes: bytes of host memory that the rank needs.
        host_bytes: bytes of host memory that all ranks of the host need.
        ranks_per_host: ranks of the host.
    """
    if not host_bytes or own_bytes * ranks_per_host == host_bytes:
        return tuple(tiers)
    part = own_bytes * ranks_per_host / host_bytes
    return tuple(
        replace(tier, limit_bytes=int(tier.limit_bytes * part))
        if tier.limit_bytes is not None and tier.is_host
        else tier
        for tier in tiers
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
