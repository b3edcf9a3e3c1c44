"""Work and bytes of one optimizer step by path, and the shortest time each path allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_args

from dsrun.estimate.memory.model_state import PaddedUnit, slices_on_drives, split_units
from dsrun.estimate.model.activations import disk_inputs, forwards_again, stored_input_bytes
from dsrun.estimate.model.stages import StageSize, whole_model
from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.axes import AxisName, AxisTraffic
from dsrun.estimate.time.collectives import gathered_in_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Bytes and arithmetic of one optimizer step; of one rank, where nothing else is said.

    Attributes:
        flops: FLOPs of the model's forward and backward, recomputation included.
        optimizer_bytes: bytes that the optimizer update reads and writes in GPU memory.
        axes: traffic over each axis of ranks.
        pcie_to_gpu_bytes: bytes copied from host memory to the GPU.
        pcie_to_host_bytes: bytes copied from the GPU to host memory.
        ddr_bytes: bytes that offloading reads and writes in host memory, of all ranks of the host.
        nvme_read_bytes: bytes read from the drives, of all ranks of the host.
        nvme_write_bytes: written to the drives, of all ranks of the host.
        mean_share: FLOPs of a rank, the mean over pipeline stages, by those of the stage with the most.
    """

    flops: float
    optimizer_bytes: int
    axes: tuple[AxisTraffic, ...]
    pcie_to_gpu_bytes: int
    pcie_to_host_bytes: int
    ddr_bytes: int
    nvme_read_bytes: int
    nvme_write_bytes: int
    mean_share: float = 1.0

    @property
    def network_bytes(self) -> int:
        """Bytes sent to other ranks over all axes; as many are received."""
        return sum(axis.sent_bytes for axis in self.axes)

    def moved_over(self, name: str) -> int:
        """Returns the bytes sent to other ranks over one axis, by its name in tables."""
        return sum(axis.sent_bytes for axis in self.axes if axis.name == name)


def most_traffic(traffic: Sequence[StepTraffic]) -> StepTraffic:
    """Returns the most of each amount: a step ends when the last rank has done its part."""
    names = [field.name for field in fields(StepTraffic) if field.name not in ("axes", "mean_share")]
    # Stages that are alike have one traffic between them.
    kinds = {id(one): one for one in traffic}.values()
    most = {name: max(getattr(one, name) for one in kinds) for name in names}
    axes: dict[tuple[object, ...], AxisTraffic] = {}
    for axis in (axis for one in kinds for axis in one.axes):
        key = (axis.name, axis.axes, axis.ranks)
        if key not in axes or axis.sent_bytes > axes[key].sent_bytes:
            axes[key] = axis
    mean_share = sum(one.flops for one in traffic) / len(traffic) / most["flops"] if most["flops"] else 1.0
    return StepTraffic(axes=tuple(axes.values()), mean_share=mean_share, **most)


@dataclass(frozen=True, slots=True)
class Floor:
    """Shortest time of one path in one step.

    Attributes:
        path: name of the path.
        seconds: None where a speed is not known.
        missing: speeds that are not known.
        in_series: whether computing stands still meanwhile, so that the times add up.
    """

    path: str
    seconds: float | None
    missing: tuple[str, ...] = ()
    in_series: bool = False


def model_flops(
    model: ModelSize,
    settings: RunSettings,
    *,
    stage: StageSize | None = None,
    again: float | None = None,
    is_fused: bool = False,
) -> float:
    """Returns the FLOPs of one rank in one optimizer step.

    6 per trained parameter and token: 2 forward, 4 backward, of which a frozen one needs 2 (none for its own
    gradient). An embedding is looked up and not multiplied. Causal attention adds 6 x layers x width x sequence a
    token. Recomputation adds another forward of the blocks, and none of the output layer.

    Args:
        model: the model.
        settings: tokens, micro batches and recomputation.
        stage: pipeline stage whose part of the work is told; None: all of the model's.
        again: forwards of the blocks that are made beyond the first one; None: what the settings say of a model on one
            stage.
        is_fused: whether attention's backward makes the products of queries and keys again, which a fused kernel does
            not keep: five products for the four that count.

    Source: PaLM (Chowdhery et al., 2022), appendix B; half of its attention term, for the mask hides half.
    FlashAttention-2 (Dao, 2023), section 4.1: five products in backward.
    """
    shape = model.architecture
    looked_up = 0
    attention = 0.0
    if shape is not None:
        looked_up = (0 if shape.tied else shape.embedding_numel) + shape.positions * shape.hidden
        attention = shape.layers * shape.block_attention_flops(settings.sequence)
    multiplied = max(0, model.numel - looked_up)
    trained = min(model.trained_numel, multiplied)
    forward = 2.0 * multiplied + attention
    backward = 2.0 * multiplied + 2.0 * trained + (2.5 if is_fused else 2) * attention
    again = forwards_again(shape, settings) if again is None else again
    stage = whole_model(model, settings.sequence) if stage is None else stage
    tokens = settings.tokens_per_micro_step * settings.accumulation_steps
    per_token = (forward + backward) * stage.cost + forward * again * stage.block_cost
    return per_token * tokens / settings.tensor_parallel


def step_traffic(
    model: ModelSize,
    units: Sequence[PaddedUnit],
    settings: RunSettings,
    machine: Machine,
    *,
    axes: tuple[AxisTraffic, ...] = (),
) -> StepTraffic:
    """Returns what one step does on every path.

    Args:
        model: the model.
        units: its units, padded for the ranks that share their state.
        settings: settings of the run.
        machine: ranks of the job and of a host.
        axes: traffic over each axis of ranks.
    """
    shard_ranks = settings.ranks_of("shard", machine.ranks)
    compute = settings.compute_bytes
    whole, shard = sum(unit.padded for unit in units), sum(unit.shard for unit in units)
    owned = shard if settings.stage >= 1 else whole
    offloads = settings.offload_optimizer != "none"
    to_gpu = to_host = ddr = read = written = 0
    # At stage 0, which the runtime refuses, all of it.
    split = split_units(units, settings)
    staying = split.staying_numel if settings.stage >= 1 and offloads else 0
    owned -= staying
    states = 4 * owned + sum(
        settings.away_states_of(unit.shard if settings.stage >= 1 else unit.padded)
        for unit in (split.leaving if settings.stage >= 1 else units)
    )
    if offloads:
        # Gradients leave in their own format, once, or as the fp32 sums of micro steps.
        gradient = 4 if settings.accumulation_steps > 1 else compute
        to_gpu += owned * compute
        to_host += owned * gradient
        # One pass over memory (gradient and state in, state and parameter out), and what the copies themselves move.
        ddr += 2 * states + owned * (2 * gradient + 2 * compute)
        if settings.steps_ahead and settings.offload_optimizer == "cpu":
            ddr += states  # what is written elsewhere than it was read is brought into the cache first
    if settings.offload_optimizer == "nvme":
        read, written = states, states
        ddr += 2 * states
    if settings.frozen_leave:
        # This rank's slice of whatever is gathered: twice in every micro step, but for what a slot still holds. In fp32
        # with a share of the optimizer on the device, slices that stay there are counted too.
        streamed = compute * gathered_in_step(units, settings, trained=settings.trained_leave)
        streamed //= shard_ranks
        ddr += streamed
        if settings.trained_leave and offloads:
            to_gpu = streamed  # new parameters come with their next use, and not after the update
        else:
            to_gpu += streamed
        stepped_here = staying if offloads else shard
        if settings.trained_leave and settings.has_master:
            to_host += stepped_here * compute
            ddr += stepped_here * compute
        if settings.offload_param == "nvme":
            slices = slices_on_drives(units, settings)
            # Each slice streams as often as any other.
            from_drives = streamed * sum(slices.away) // max(slices.staying + sum(slices.away), 1)
            to_drives = max(0, shard - slices.staying) * compute if settings.trained_leave else 0
            read, written = read + from_drives, written + to_drives
            ddr += from_drives + to_drives
    shape = model.architecture
    if shape is not None and settings.activations_on_cpu and settings.recompute == "blocks":
        inputs = settings.recomputed(shape.layers).segments
        moved = inputs * stored_input_bytes(shape, settings) * settings.accumulation_steps
        to_gpu, to_host, ddr = to_gpu + moved, to_host + moved, ddr + 2 * moved
        if settings.activation_buffers is not None:
            on_disk = moved // inputs * disk_inputs(inputs)
            # Those still in memory when backward begins are not read; buffers are as many, at least.
            still_there = min(settings.activation_buffers, inputs)
            read, written = read + moved // inputs * (inputs - still_there), written + on_disk
            ddr += 2 * on_disk
    return StepTraffic(
        flops=model_flops(model, settings),
        optimizer_bytes=update_bytes(staying if offloads else owned, settings),
        axes=axes,
        pcie_to_gpu_bytes=to_gpu,
        pcie_to_host_bytes=to_host,
        ddr_bytes=ddr * machine.ranks_per_host,
        nvme_read_bytes=read * machine.ranks_per_host,
        nvme_write_bytes=written * machine.ranks_per_host,
    )


def update_bytes(owned: int, settings: RunSettings) -> int:
    """Returns bytes the update reads and writes: gradient in, master and states in and out, parameter out.

    28 an element for Adam in fp32, and 2 more where the parameter is another tensor than the master.
    """
    parameter = settings.compute_bytes if settings.has_master else 0
    return owned * (2 * settings.master_bytes + parameter) + settings.sums_of(owned) + 2 * settings.states_of(owned)


def floors(traffic: StepTraffic, settings: RunSettings, machine: Machine, *, stretch: float = 1.0) -> tuple[Floor, ...]:
    """Returns the shortest time of every path that has something to do, at achievable speeds.

    Both directions of a link are used at once, so the longer one counts. Ranks that share layers or sequences wait for
    each other before they go on computing; of what is summed in backward nothing is waited for with
    `tensor_parallel.tp_overlap_comm`.

    Ranks that share cores compute until the longest chain of ranks that wait for each other has ended, and until the
    cores have done all ranks' work: what one waits costs nothing while as many others compute as there are cores. They
    copy with the same cores, so that nothing they move within a host overlaps with computing.

    Args:
        traffic: bytes and arithmetic of a step.
        settings: settings of the run.
        machine: speeds of the paths.
        stretch: factor of the time that computing takes with what ranks wait for each other.
    """
    speeds = machine.speeds(half=settings.compute_bytes == 2)
    pcie = max(traffic.pcie_to_gpu_bytes, traffic.pcie_to_host_bytes)
    share = machine.ranks_per_core
    busy = max(stretch, share * traffic.mean_share)
    found = [
        _floor("compute", traffic.flops * busy, speeds.flops, "flops", in_series=True),
        _floor("optimizer", traffic.optimizer_bytes * share, speeds.memory, "memory", in_series=True),
        *(_axis_floor(name, traffic, settings, machine, speeds, stretch, busy) for name in get_args(AxisName)),
        _floor("PCIe", pcie, speeds.pcie, "pcie"),
        _floor("DDR", traffic.ddr_bytes, speeds.ddr, "ddr"),
        _nvme(traffic, speeds),
    ]
    return tuple(floor for floor in found if floor is not None)


def _floor(path: str, amount: float, speed: float | None, name: str, *, in_series: bool = False) -> Floor | None:
    if not amount:
        return None
    return Floor(path, None if speed is None else amount / speed, (name,) if speed is None else (), in_series)


def _axis_floor(
    name: AxisName,
    traffic: StepTraffic,
    settings: RunSettings,
    machine: Machine,
    speeds: Speeds,
    stretch: float,
    busy: float,
) -> Floor | None:
    """Returns the time of all that goes over one axis, in all its sets of ranks, one after the other."""
    moved = [axis for axis in traffic.axes if axis.name == name]
    if not moved:
        return None
    waits = name in ("tensor", "context")
    in_series = waits or (machine.cores_per_host is not None and not any(axis.crosses_hosts for axis in moved))
    total = 0.0
    for axis in moved:
        wire = "network" if axis.crosses_hosts else "peer"
        speed = getattr(speeds, wire)
        if speed is None:
            return Floor(name, None, (wire,), in_series)
        # Every set of ranks that spans hosts sends through the network of each of them once, all at the same time.
        sets = machine.ranks_per_host / axis.peers_per_host if axis.crosses_hosts else 1
        seconds = axis.sent_bytes * sets / speed
        if axis.crosses_hosts and speeds.peer is not None:
            seconds = max(seconds, axis.sent_bytes / speeds.peer)  # and from rank to rank within a host
        if waits:
            seconds *= stretch if axis.crosses_hosts else busy
        elif not axis.crosses_hosts:
            seconds *= machine.ranks_per_core
        total += seconds
    if name == "tensor" and settings.tensor_overlaps:
        total /= 2
    return Floor(name, total, in_series=in_series)


def _nvme(traffic: StepTraffic, speeds: Speeds) -> Floor | None:
    """Reading and writing share the drive's bus, so their times add up."""
    if not traffic.nvme_read_bytes and not traffic.nvme_write_bytes:
        return None
    if speeds.nvme_read is None or speeds.nvme_write is None:
        missing = tuple(name for name in ("nvme_read", "nvme_write") if getattr(speeds, name) is None)
        return Floor("NVMe", None, missing)
    return Floor("NVMe", traffic.nvme_read_bytes / speeds.nvme_read + traffic.nvme_write_bytes / speeds.nvme_write)


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Shortest time of a step.

    Attributes:
        seconds: None where no path's time is known.
        bottleneck: the path that takes longest of those known.
        complete: no path's time is missing.
    """

    seconds: float | None
    bottleneck: str | None
    complete: bool


def step_floor(paths: Sequence[Floor]) -> StepFloor:
    """Returns the shortest time of a step in which everything that can overlap does.

    The update on the GPU follows the backward on the same GPU, and ranks that share layers wait for each other within
    both, so these add up; other links and host memory work beside them.
    """
    known = {floor.path: floor.seconds for floor in paths if floor.seconds is not None}
    series = {floor.path: known[floor.path] for floor in paths if floor.in_series and floor.path in known}
    gpu = sum(series.values())
    beside = {path: seconds for path, seconds in known.items() if path not in series}
    complete = bool(paths) and len(known) == len(paths)
    if not known:
        return StepFloor(None, None, complete)
    longest = max(beside, key=lambda path: beside[path], default=None)
    if longest is None or gpu >= beside[longest]:
        return StepFloor(gpu, max(series, key=lambda path: series[path]), complete)
    return StepFloor(beside[longest], longest, complete)
