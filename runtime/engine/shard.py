"""A model sharded as the plan says: units with their buffers, how parameters are gathered and gradients reduced.

No hook is placed and no optimizer made here; what becomes of the model is a value, in `model/sharded.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from dsrun.config.buckets import gather_budgets, resolve_buckets
from dsrun.config.config import Config
from dsrun.units import format_names

from ..layout.cuts import Cuts
from ..memory.arenas import Arenas
from ..memory.host_pool import Say, host_pool_for
from ..mesh.agree.same import check_agreement
from ..mesh.collectives import Collectives
from ..mesh.join.groups import ProcessGroupMesh
from ..offload.host_gradients import HostGradients
from ..offload.params.on_disk import DiskShards
from ..offload.params.on_host import HostShards
from ..optim.groups import GroupAssignment
from ..precision.fp32_modules import Fp32Modules, find_fp32_modules
from ..precision.policy import DTYPES, PrecisionPolicy
from ..zero.creation.frozen import join_frozen, place_frozen
from ..zero.creation.placement import Placement
from ..zero.creation.units import build_store, build_units
from ..zero.grads.reducer import GradReducer
from ..zero.params.slots import turns_of
from ..zero.units.find import UnitSpec
from ..zero.units.leaves import mark_leaves
from ..zero.units.plan import ZeroPlan
from ..zero.units.trained import mark_left_out
from ..zero.units.unit import ParamUnit
from .compose.describe import hidden_size
from .compose.request import Request
from .host.disk import file_of_parameters
from .host.tiers import Tiers
from .model.first_values import draw_meta, share_ties
from .model.sharded import ShardedModel, sums_of
from .model.stages import CutModel
from .model.trained_units import trained_units
from .step import holds_parts

_STAYS_WITH_OPTIMIZER = (
    "dsrun: parameters in the optimizer's own dtype are what it updates, so with the optimizer on the device trained "
    'ones do not go to host memory (`offload_param`): use bf16, or set `offload_optimizer.device` to "cpu" too'
)


def _tell_left_out(names: Sequence[str], say: Say) -> None:
    shown = format_names(names, 3)
    say(
        f"dsrun: not updated, for no optimizer group has them: {shown}; they get gradients of their own rank's "
        "batch, in `.grad`"
    )


def shard_model(
    request: Request,
    settings: Config,
    mesh: ProcessGroupMesh,
    cuts: Cuts,
    chunks: CutModel,
    *,
    precision: PrecisionPolicy,
    tiers: Tiers,
    say: Say,
) -> ShardedModel:
    """Takes a model's parameters over: to this rank's device, with rank 0's values, into flat buffers.

    Enters the collectives of `draw_meta`, `share_ties`, `build_units`, `join_frozen` and `place_frozen`.

    Args:
        request: the model, the same on every rank, and the optimizer groups of its parameters.
        settings: the config.
        mesh: ranks and device.
        cuts: parameters that an axis beside data has changed.
        chunks: the model's chunks on this rank.
        precision: dtypes of parameters and masters.
        tiers: Memory of the device, its host and drives, and whose masters go where.
        say: callback that gets a message, once for the whole job, about each thing that goes otherwise than the config
            asks.

    Raises:
        ModelError: a parameter is a copy of a sharded one, or on the meta device with no method that gives it values.
    """
    model, assignment, updates = request.model, request.assignment, request.updates(settings)
    plan = ZeroPlan.of_stage(settings.cutting_stage)
    replicas, memory = mesh.replicas(), tiers.memory
    leaves = settings.zero_optimization.leaf_module
    mark_leaves(model, classes=leaves.classes, names=leaves.names, name_suffixes=leaves.name_suffixes, say=say)
    slices = _slices_of_parameters(settings, plan, mesh, tiers, say=say)
    draw_meta(model, settings, mesh, on_host=slices is not None, cuts=cuts)
    share_ties(chunks.stages, mesh)
    left_out = mark_left_out(model, assignment.group_of)  # by now, for those on the meta device have been made anew
    if left_out:
        _tell_left_out(left_out, say)
    kept = find_fp32_modules(model, settings.data_types.keep_in_fp32_modules, compute=precision.compute)
    # An optimizer on the device that updates the very parameters has them there.
    trained_leave = slices is not None and (precision.has_separate_master or tiers.host is not None or not updates)
    placement = _placement(tiers, slices if trained_leave else None, precision)
    units = _trained_units(
        model,
        settings,
        assignment,
        mesh,
        cuts,
        precision=precision,
        kept=kept,
        placement=placement,
        memory=memory,
        piece_of=chunks.piece_of,
    )
    chunks.ties.bind(units)
    _count_once(units, settings, plan, mesh)
    leaving = [unit for unit in units if unit.steps_on_host]
    _end_admissions(tiers, leaving)
    _reserve_leaving(slices, [unit for unit in units if updates and not unit.steps_on_host], precision.compute)
    hidden = hidden_size(model, units)
    resolved = settings if hidden is None else resolve_buckets(settings, hidden)
    budgets = gather_budgets(resolved)
    gathered = join_frozen(
        model,
        units,
        plan,
        budgets,
        replicas,
        precision=precision,
        device=mesh.device,
        memory=memory,
        tier=slices,
        kept=kept.tensors,
        cuts=cuts,
    )
    if slices is not None and (not trained_leave or (units and all(unit.tier is None for unit in units))):
        say(_STAYS_WITH_OPTIMIZER + ("" if gathered.frozen else ", and nothing is frozen that could"))
    place_frozen(model, replicas, precision=precision, device=mesh.device, cut=gathered.frozen, kept=kept.tensors)
    mark_left_out(model, assignment.group_of)  # again: those in slices have been made anew
    gathering = turns_of(gathered.acquired, budgets, chunk_of=chunks.gather_turns(gathered.acquired))
    for unit in gathered.frozen:
        unit.repeats_over = mesh.spec.wide(mesh.spec.replica_axes())
    store = build_store(gathered.acquired, plan, replicas, gathering=gathering, memory=memory)
    gradients_of = partial(_host_gradients, settings=settings, mesh=mesh, tiers=tiers, compute=precision.compute)
    away = gradients_of(leaving)
    return ShardedModel(
        chunks=chunks,
        module=model,
        plan=plan,
        precision=precision,
        units=units,
        acquired=gathered.acquired,
        frozen=gathered.frozen,
        gathering=gathering,
        store=store,
        reducer=_reducer(units, settings, plan, replicas, chunks, leaving=leaving, away=away, memory=memory),
        settings=resolved,
        kept=kept,
        leaving=leaving,
        gradients_of=gradients_of,
        away=away,
        disk=tiers.disk if leaving else None,
    )


def _placement(tiers: Tiers, slices: HostShards | DiskShards | None, precision: PrecisionPolicy) -> Placement:
    return Placement(
        tier=slices,
        masters_host=None if tiers.host is None else tiers.host.pool_of(copied=not precision.has_separate_master),
        masters_away=tiers.disk or tiers.halves,
        stays=tiers.residency,
        moves=tiers.moves,
    )


def _trained_units(
    model: nn.Module,
    settings: Config,
    assignment: GroupAssignment,
    mesh: ProcessGroupMesh,
    cuts: Cuts,
    *,
    precision: PrecisionPolicy,
    kept: Fp32Modules,
    placement: Placement,
    memory: Arenas,
    piece_of: Mapping[str, str] | None,
) -> list[ParamUnit]:
    specs = trained_units(model, settings, compute=precision.compute, kept=kept.tensors, cuts=cuts, piece_of=piece_of)
    _check_tied(specs, assignment, settings, mesh)
    return build_units(
        specs,
        ZeroPlan.of_stage(settings.cutting_stage),
        lambda lies: mesh.replicas_over(lies.cut_over, lies.stages),
        precision=precision,
        device=mesh.device,
        group_of=assignment.group_of,
        memory=memory,
        placement=placement,
    )


def _check_tied(
    specs: Sequence[UnitSpec], assignment: GroupAssignment, settings: Config, mesh: ProcessGroupMesh
) -> None:
    """Refuses what several pipeline stages use, where they do not use it alike; their ranks compare it.

    Raises:
        ModelError: naming the parameters.
    """
    for spec in specs:
        stages = spec.placement.stages
        if not stages:
            continue
        facts = [
            (name, {"shape": list(p.shape), "dtype": str(p.dtype), "group": assignment.group_of[id(p)]})
            for name, p in spec.params
        ]
        check_agreement(
            {"the parameters that they share": facts},
            mesh.replicas_over(spec.placement.cut_over, stages),
            device=mesh.device,
            ranks=mesh.spec.replicas_over(mesh.info.rank, spec.placement.cut_over, stages),
            whose=f" of stages {' and '.join(map(str, stages))}",
        )


def _end_admissions(tiers: Tiers, leaving: Sequence[ParamUnit]) -> None:
    """Has all masters that leave where they are to be; a file that none has gone to is closed."""
    if tiers.halves is not None:
        for position, unit in enumerate(leaving):
            unit.halves = tiers.halves.halves(position, unit.shard)
    if tiers.disk is not None:
        tiers.disk.end() if leaving else tiers.disk.close()


def _reserve_leaving(
    slices: HostShards | DiskShards | None, stepped_here: Sequence[ParamUnit], compute: torch.dtype
) -> None:
    """Reserves what parameters pass through on their way to the host, where units are stepped on the device."""
    if slices is not None and any(unit.tier is not None for unit in stepped_here):
        in_memory = slices.host if isinstance(slices, DiskShards) else slices
        in_memory.reserve_leaving(max(unit.layout.shard_numel for unit in stepped_here), compute)


def _host_gradients(
    leaving: Sequence[ParamUnit], *, settings: Config, mesh: ProcessGroupMesh, tiers: Tiers, compute: torch.dtype
) -> HostGradients | None:
    """Returns what takes gradients of units to the host; None where none are stepped there."""
    if tiers.host is None or not leaving:
        return None
    assert settings.batch is not None, "the config was loaded with a world size"
    comm_name = settings.communication_data_type
    shared = mesh.replicas().size > 1
    summed_here = settings.reduces_once_an_update and any(unit.replicas.size > 1 for unit in leaving)
    return HostGradients(
        [unit.owned[1] - unit.owned[0] for unit in leaving],
        bus=tiers.host.bus,
        device=mesh.device,
        travels=DTYPES[comm_name] if comm_name is not None and shared else torch.float32 if summed_here else compute,
        accumulates=settings.batch.accumulation_steps > 1 and not summed_here,
        factors=[unit.divide_before / unit.divide_by for unit in leaving],
        pool=tiers.host.pool,
        memory=tiers.memory,
        ahead=settings.zero_optimization.offload_optimizer.super_offload,
    )


def _reducer(
    units: Sequence[ParamUnit],
    settings: Config,
    plan: ZeroPlan,
    collectives: Collectives,
    chunks: CutModel,
    *,
    leaving: Sequence[ParamUnit],
    away: HostGradients | None,
    memory: Arenas,
) -> GradReducer:
    comm_name = settings.communication_data_type
    return GradReducer(
        units,
        collectives,
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
        comm_dtype=None if comm_name is None else DTYPES[comm_name],
        sums=None if away is None else sums_of(units, leaving, away),
        sums_early=away is not None,  # they leave the device beside the backward
        memory=memory,
        notes_unused=not settings.zero_optimization.step_unused_parameters,
        once_an_update=settings.reduces_once_an_update,
        chunk_of=chunks.turns_of(units) if plan.shard_gradients and settings.pipeline.takes_turns else None,
        uses=chunks.ties if chunks.ties.units else None,
    )


def _count_once(units: Sequence[ParamUnit], settings: Config, plan: ZeroPlan, mesh: ProcessGroupMesh) -> None:
    """Says how the units' gradients become means, and which elements this rank counts in sums over the job."""
    spec = mesh.spec
    for unit in units:
        of_replicas, of_samples = spec.replica_axes(unit.placement.cut_over), spec.role_axes("batch")
        # Of samples along an axis that the unit is cut over, each rank's backward adds up those of all: the mean is
        # over these too.
        averaged = {*of_replicas, *of_samples} - {*unit.placement.summed_over}
        repeated = averaged - {*of_samples}
        over_stages = spec.role_axes("pipe") if unit.placement.stages else ()
        unit.repeats_over = spec.wide((*of_replicas, *over_stages))
        if unit.placement.stages:
            ties = mesh.ties_over(unit.placement.stages)
            unit.ties = ties if ties.size < unit.replicas.size else None
        unit.divide_before, unit.divide_by = _divisors(settings, repeats=spec.size(repeated), size=spec.size(averaged))
    if not plan.shard_optimizer and (spec.stages > 1 or holds_parts(units, mesh.world)):
        for unit in units:
            unit.counted = unit.layout.shard_range(unit.replicas.rank)


def _divisors(settings: Config, *, repeats: int, size: int) -> tuple[float, float]:
    """Returns what gradients of a unit are divided by before they are added up over its replicas, and in all.

    Args:
        settings: the config.
        repeats: ranks that compute the gradient of the same samples.
        size: ranks whose gradients are averaged: `repeats` times those with samples of their own.
    """
    if settings.gradient_allreduce_op == "sum":
        return 1.0, float(repeats)
    return float(size) if settings.prescale_gradients else settings.gradient_predivide_factor, float(size)


def _slices_of_parameters(
    settings: Config, plan: ZeroPlan, mesh: ProcessGroupMesh, tiers: Tiers, *, say: Say
) -> HostShards | DiskShards | None:
    """Returns what holds slices of parameters in host memory or on a disk, where the config asks for it."""
    section = settings.zero_optimization.offload_param
    if not plan.shard_parameters or section.device == "none":
        return None
    pool = host_pool_for(mesh.device, pin=section.pin_memory, say=say)
    host = HostShards(tiers.bus, tiers.memory, pool=pool, device=mesh.device)
    if section.device == "cpu":
        return host
    return DiskShards(
        host,
        lambda: file_of_parameters(settings, rank=mesh.info.rank),
        most_in_memory=section.max_in_cpu,
        buffers=section.buffer_count,
        bus=tiers.bus,
        memory=tiers.memory,
        pool=pool,
    )
