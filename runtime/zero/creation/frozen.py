"""Parameters that are not trained, and buffers: in the compute dtype, with rank 0's values.

[Note: frozen parameters]
They have no gradient, master or optimizer state. At stages 0 to 2 every rank has them whole. At stage 3 those of a
unit's module are a unit of their own, which is cut like a trained one: 2 bytes an element in bf16, over all ranks
together. The trained unit of the module has it as its `frozen`, so that both are gathered and dropped at once; where
the module trains nothing, it stands alone. Backward gathers them too, for gradients of inputs need weights.
Whole stay parameters that no unit's module has to itself, quantised ones, and those that the config lets stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dsrun.choices.gather_plan import GatherBudgets, UnitElements, choose_staying

from ...layout.cuts import NO_CUTS, Cuts
from ...layout.unit_layout import lay_out
from ...memory.arenas import Arenas
from ...mesh.collectives import Collectives, own_slice
from ...precision.policy import PrecisionPolicy
from ..access.pieces import UnitHome
from ..params.slots import elements_of
from ..partition_parameters import home_of, is_zero_param, memory_of, set_memory
from ..units.find import UnitSpec, find_frozen_units
from ..units.plan import ZeroPlan
from ..units.tier import ShardTier
from ..units.trained import is_trained
from ..units.unit import ParamUnit
from .stored_files import StoredHome
from .unbuilt import UnbuiltOwner
from .values import check_not_copies, take_values


@dataclass(frozen=True, slots=True)
class GatheredUnits:
    """What takes part in gathering.

    Attributes:
        acquired: units that hooks and store know, in order of registration, each with its `frozen`; rest unit last.
        frozen: the units of frozen parameters.
    """

    acquired: list[ParamUnit]
    frozen: list[ParamUnit]


def join_frozen(
    model: nn.Module,
    units: Sequence[ParamUnit],
    plan: ZeroPlan,
    budgets: GatherBudgets,
    collectives: Collectives,
    *,
    precision: PrecisionPolicy,
    device: torch.device,
    memory: Arenas | None = None,
    tier: ShardTier | None = None,
    kept: Collection[int] = (),
    cuts: Cuts = NO_CUTS,
) -> GatheredUnits:
    """Cuts frozen parameters where the plan shards parameters, but for what stays; see [Note: frozen parameters].

    Enters the collectives of `take_values` for each. One unit at a time is held whole.

    Args:
        model: the model.
        units: the trained units; each gets its `frozen`.
        plan: plan of what is sharded.
        budgets: limits that the config sets for parameters that stay gathered.
        collectives: ranks that hold the same frozen parameters, which are sharded over them.
        precision: dtypes of the engine; the one of parameters is used.
        device: device that the parameters are used on.
        memory: arenas that the slices are reserved in; None: in an arena of their own.
        tier: tier that holds the slices instead; None where there is none.
        kept: ids of parameters that stay in fp32, and so whole.
        cuts: trained parameters that an axis beside data has changed; see `find_frozen_units`.

    Raises:
        ModelError: a parameter is a copy of a sharded one.
    """
    if not plan.shard_parameters:
        return GatheredUnits(list(units), [])
    specs = {id(spec.module): spec for spec in find_frozen_units(model, kept=kept, cuts=cuts)}
    trained = {id(unit.module): unit for unit in units if unit.module is not None}
    modules = [id(module) for module in model.modules() if id(module) in specs or id(module) in trained]
    elements = [_elements(trained.get(key), specs.get(key), world_size=collectives.size) for key in modules]
    staying = {key for key, stays in zip(modules, choose_staying(elements, budgets), strict=True) if stays.frozen}
    cut = [specs[key] for key in modules if key in specs and key not in staying]
    for spec in cut:
        check_not_copies(spec)
    frozen = [ParamUnit(spec, collectives, index=len(units) + number, trains=False) for number, spec in enumerate(cut)]
    _fill(frozen, precision=precision, device=device, memory=memory or Arenas(), tier=tier)
    alone = {id(unit.module): unit for unit in frozen}
    for key, unit in trained.items():
        unit.frozen = alone.pop(key, None)
    acquired = [unit for key in modules if (unit := trained.get(key) or alone.get(key)) is not None]
    return GatheredUnits([*acquired, *(unit for unit in units if unit.module is None)], frozen)


def place_frozen(
    model: nn.Module,
    collectives: Collectives,
    *,
    precision: PrecisionPolicy,
    device: torch.device,
    cut: Collection[ParamUnit] = (),
    kept: Collection[int] = (),
) -> None:
    """Brings frozen parameters and buffers to `device`, floating ones in their dtype, with rank 0's values.

    Enters one broadcast a tensor. Quantised tensors, which torch does not view as bytes, keep this rank's values.

    Args:
        model: the model.
        collectives: ranks that hold the same tensors; the first one's values are taken.
        precision: dtypes of the engine; those of parameters and buffers are used.
        device: device that the tensors are moved to.
        cut: units of frozen parameters, which stay as they are.
        kept: ids of parameters and buffers that stay in fp32.
    """
    done = {id(param) for unit in cut for param in unit.params}
    buffers = {id(buffer): precision.buffers or precision.compute for buffer in model.buffers()}
    dtypes = {**buffers, **dict.fromkeys(kept, torch.float32)}
    tensors = [param for param in model.parameters() if not is_trained(param) and id(param) not in done]
    for param in tensors:
        home = home_of(param)
        if isinstance(home, UnbuiltOwner):
            set_memory(param, home.nursery.give(home))
        elif isinstance(home, UnitHome) and is_zero_param(param):
            set_memory(param, home.access.pieces.hand_over(home, collectives))
        elif isinstance(home, StoredHome):
            values = home.stored.read(0, param.numel()).view(param.shape)
            home.keep(device)
            set_memory(param, values.to(device))
    for tensor in [*tensors, *model.buffers()]:
        dtype = dtypes.get(id(tensor), precision.compute) if tensor.is_floating_point() else tensor.dtype
        set_memory(tensor, memory_of(tensor).to(device=device, dtype=dtype))
        if tensor.numel() and not tensor.is_quantized:
            flat = memory_of(tensor).contiguous().view(-1)
            # As bytes, for a backend need not know every dtype (Gloo has no bool).
            collectives.broadcast(flat.view(torch.uint8), source=0, label="frozen tensors").wait()
            set_memory(tensor, flat.view(tensor.shape))


def whole_bytes(model: nn.Module, *, cut: Collection[ParamUnit]) -> int:
    """Returns the bytes of frozen parameters that this rank has whole.

    Args:
        model: model after `place_frozen` has run on it.
        cut: units of those that it has a slice of.
    """
    done = {id(param) for unit in cut for param in unit.params}
    return sum(param.nbytes for param in model.parameters() if not is_trained(param) and id(param) not in done)


def _elements(unit: ParamUnit | None, spec: UnitSpec | None, *, world_size: int) -> UnitElements:
    own = UnitElements(0, 0) if unit is None else elements_of(unit)
    if spec is None:
        return own
    layout = lay_out(spec.name, [(name, param.shape) for name, param in spec.params], world_size=world_size)
    return UnitElements(own.numel, own.padded, layout.numel, layout.padded_numel)


def _fill(
    units: Sequence[ParamUnit],
    *,
    precision: PrecisionPolicy,
    device: torch.device,
    memory: Arenas,
    tier: ShardTier | None,
) -> None:
    """Gives each unit its slice of the first values."""
    if not units:
        return
    numels = [unit.layout.shard_numel for unit in units]
    shards = None
    if tier is None:
        shards = memory.reserve(
            "frozen shards",
            sum(numels),
            lambda numel: units[0].replicas.zeros(numel, dtype=precision.compute, device=device),
        )
    else:
        tier.reserve("frozen shards", numels, precision.compute, labels=[unit.label for unit in units])
    scratch = torch.empty(max(unit.layout.padded_numel for unit in units), dtype=precision.compute, device=device)
    for unit in units:
        whole = scratch.narrow(0, 0, unit.layout.padded_numel).zero_()
        take_values(unit, whole, device=device)
        mine = own_slice(whole, rank=unit.replicas.rank, size=unit.replicas.size)
        if shards is not None:
            unit.shard = shards.take(unit.layout.shard_numel).copy_(mine)
        elif tier is not None:
            unit.tier, unit.shard = tier, tier.admit(unit.index, mine)
        unit.owned = unit.layout.shard_range(unit.replicas.rank)
        # Whoever sets a piece sets the one copy there is, as where masters are the parameters themselves.
        unit.master = unit.shard
        for param in unit.params:
            set_memory(param, torch.empty(0, dtype=precision.compute, device=device))
