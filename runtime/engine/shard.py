"""A model sharded as the plan says: units with their buffers, how parameters are gathered and gradients reduced.

No hook is placed and no optimizer made here; what becomes of the model is a value, in `sharded_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dsrun.config.buckets import gather_budgets, resolve_buckets
from dsrun.config.config import Config

from ..memory.arenas import Arenas
from ..memory.bus import Bus
from ..memory.host_pool import Say, host_pool_for
from ..mesh.join.groups import ProcessGroupMesh
from ..mesh.spec import DATA_AXIS
from ..offload.disk.states import DiskStates
from ..offload.host_gradients import HostGradients
from ..offload.params.on_disk import DiskShards
from ..offload.params.on_host import HostShards
from ..offload.states.split_masters import SplitMasters
from ..optim.groups import GroupAssignment
from ..precision.configured import autocast_of
from ..precision.kept import find_kept
from ..precision.policy import DTYPES, PrecisionPolicy
from ..precision.traffic import find_light
from ..zero.build.frozen import join_frozen, place_frozen
from ..zero.build.meta import has_meta, materialise
from ..zero.build.seeds import Nursery
from ..zero.build.units import build_store, build_units
from ..zero.grads.reducer import GradReducer
from ..zero.params.slots import turns_of
from ..zero.units.find import find_units
from ..zero.units.leaves import mark_leaves
from ..zero.units.plan import ZeroPlan
from ..zero.units.trained import mark_left_out
from ..zero.units.unit import ParamUnit
from .compose.describe import hidden_size
from .host.disk import file_of_parameters
from .host.residency import Stays, looks_again
from .host.tier import HostTier
from .sharded_model import ShardedModel, sums_of

_STAYS_WITH_OPTIMIZER = (
    "dsrun: parameters in the optimizer's own dtype are what it updates, so with the optimizer on the device trained "
    'ones do not go to host memory (`offload_param`): use bf16, or set `offload_optimizer.device` to "cpu" too'
)


def _tell_left_out(names: Sequence[str], say: Say) -> None:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    say(
        f"dsrun: not updated, for no optimizer group has them: {shown}{more}; they get gradients of their own rank's "
        "batch, in `.grad`"
    )


def shard_model(
    model: nn.Module,
    settings: Config,
    assignment: GroupAssignment,
    mesh: ProcessGroupMesh,
    *,
    precision: PrecisionPolicy,
    memory: Arenas,
    bus: Bus,
    updates: bool,
    say: Say,
    masters_host: HostTier | None = None,
    masters_away: DiskStates | None = None,
    masters_split: SplitMasters | None = None,
    stays: Stays | None = None,
) -> ShardedModel:
    """Takes a model's parameters over: to this rank's device, with rank 0's values, into flat buffers.

    Enters the collectives of `materialise`, `build_units`, `join_frozen` and `place_frozen`, on the data axis.

    Args:
        model: the same on every rank.
        settings: the config.
        assignment: optimizer groups of the parameters.
        mesh: ranks and device.
        precision: dtypes of parameters and masters.
        memory: where the buffers are reserved.
        bus: between the device and its host.
        updates: an optimizer comes with the model.
        say: told once what goes otherwise than the config asks.
        masters_host: host memory that masters go to, and the way there; None: they stay on the device.
        masters_away: takes them from there to a disk; None: they stay in host memory.
        masters_split: takes their lower halves, where the upper ones are parameters in host memory; None: they are
            whole.
        stays: whose masters stay on the device although there is a place for masters elsewhere; None: none.

    Raises:
        ModelError: a parameter is a copy of a sharded one, or on the meta device with no method that gives it values.
    """
    plan = ZeroPlan.of_stage(settings.zero_optimization.stage)
    data_axis = mesh.axes[DATA_AXIS]
    leaves = settings.zero_optimization.leaf_module
    mark_leaves(model, classes=leaves.classes, names=leaves.names, name_suffixes=leaves.name_suffixes, say=say)
    host = _host_shards(settings, plan, mesh, memory, bus=bus, say=say)
    if has_meta(model):
        materialise(model, Nursery(data_axis, device=mesh.device, on_host=host is not None))
    left_out = mark_left_out(model, assignment.group_of)  # by now, for those on the meta device have been made anew
    if left_out:
        _tell_left_out(left_out, say)
    kept = find_kept(model, settings.data_types.keep_in_fp32_modules, compute=precision.compute)
    # An optimizer on the device that updates the very parameters has them there.
    trained_leave = host is not None and (precision.has_separate_master or masters_host is not None or not updates)
    units = build_units(
        find_units(
            model,
            kept=kept.tensors,
            light=find_light(model, settings.torch_autocast.lower_precision_safe_modules, compute=precision.compute),
            wire=autocast_of(settings),
        ),
        plan,
        data_axis,
        precision=precision,
        device=mesh.device,
        group_of=assignment.group_of,
        memory=memory,
        tier=host if trained_leave else None,
        masters_host=None if masters_host is None else masters_host.pool_of(copied=not precision.has_separate_master),
        masters_away=masters_away or masters_split,
        stays=stays,
        moves=looks_again(settings),
    )
    leaving = [unit for unit in units if unit.is_away]
    if masters_split is not None:
        for position, unit in enumerate(leaving):
            unit.halves = masters_split.halves(position, unit.shard)
    if masters_away is not None:
        masters_away.end() if leaving else masters_away.close()
    stepped_here = [unit for unit in units if updates and not unit.is_away]
    if host is not None and any(unit.tier is not None for unit in stepped_here):
        in_memory = host.host if isinstance(host, DiskShards) else host
        in_memory.reserve_leaving(max(unit.layout.shard_numel for unit in stepped_here), precision.compute)
    hidden = hidden_size(model, units)
    resolved = settings if hidden is None else resolve_buckets(settings, hidden)
    budgets = gather_budgets(resolved)
    gathered = join_frozen(
        model,
        units,
        plan,
        budgets,
        data_axis,
        precision=precision,
        device=mesh.device,
        memory=memory,
        tier=host,
        kept=kept.tensors,
    )
    if host is not None and (not trained_leave or (units and all(unit.tier is None for unit in units))):
        say(_STAYS_WITH_OPTIMIZER + ("" if gathered.frozen else ", and nothing is frozen that could"))
    place_frozen(model, data_axis, precision=precision, device=mesh.device, cut=gathered.frozen, kept=kept.tensors)
    mark_left_out(model, assignment.group_of)  # again: those in slices have been made anew
    gathering = turns_of(gathered.acquired, budgets)
    store = build_store(gathered.acquired, plan, data_axis, gathering=gathering, memory=memory)
    wire = settings.communication_data_type
    divide_before, divide_by = _divisors(settings, data_axis.size)

    def gradients_of(going: Sequence[ParamUnit]) -> HostGradients | None:
        if masters_host is None or not going:
            return None
        assert settings.batch is not None, "the config was loaded with a world size"
        return HostGradients(
            [unit.owned[1] - unit.owned[0] for unit in going],
            bus=masters_host.bus,
            device=mesh.device,
            travels=DTYPES[wire] if wire is not None and data_axis.size > 1 else precision.compute,
            accumulates=settings.batch.accumulation_steps > 1,
            factor=divide_before / divide_by,
            pool=masters_host.pool,
            memory=memory,
            ahead=settings.zero_optimization.offload_optimizer.super_offload,
        )

    away = gradients_of(leaving)
    reducer = GradReducer(
        units,
        data_axis,
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
        divide_before=divide_before,
        divide_by=divide_by,
        wire=None if wire is None else DTYPES[wire],
        sums=None if away is None else sums_of(units, leaving, away),
        sums_early=away is not None,  # they leave the device beside the backward
        memory=memory,
        notes_unused=not settings.zero_optimization.step_unused_parameters,
    )
    return ShardedModel(
        module=model,
        plan=plan,
        precision=precision,
        units=units,
        acquired=gathered.acquired,
        frozen=gathered.frozen,
        gathering=gathering,
        store=store,
        reducer=reducer,
        settings=resolved,
        kept=kept,
        leaving=leaving,
        gradients_of=gradients_of,
        away=away,
        disk=masters_away if leaving else None,
    )


def _divisors(settings: Config, size: int) -> tuple[float, float]:
    """Returns what gradients of `size` ranks are divided by before they are added up, and in all; both 1 for sums."""
    if settings.gradient_allreduce_op == "sum":
        return 1.0, 1.0
    return float(size) if settings.prescale_gradients else settings.gradient_predivide_factor, float(size)


def _host_shards(
    settings: Config, plan: ZeroPlan, mesh: ProcessGroupMesh, memory: Arenas, *, bus: Bus, say: Say
) -> HostShards | DiskShards | None:
    """Returns what holds slices of parameters in host memory or on a disk, where the config asks for it."""
    section = settings.zero_optimization.offload_param
    if not plan.shard_parameters or section.device == "none":
        return None
    pool = host_pool_for(mesh.device, pin=section.pin_memory, say=say)
    host = HostShards(mesh.axes[DATA_AXIS], bus, memory, pool=pool, device=mesh.device)
    if section.device == "cpu":
        return host
    return DiskShards(
        host,
        lambda: file_of_parameters(settings, rank=mesh.info.rank),
        most_in_memory=section.max_in_cpu,
        buffers=section.buffer_count,
        collectives=mesh.axes[DATA_AXIS],
        bus=bus,
        memory=memory,
        pool=pool,
    )
