"""From a model to units with memory: values agreed over ranks, buffers cut as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from dsrun.choices.gather_plan import GatherPlan

from ...layout.cuts import RankPlacement, in_cut
from ...memory.arenas import Arenas
from ...mesh.collectives import Collectives
from ...precision.policy import PrecisionPolicy
from ..params.slots import in_dtype
from ..params.slotted import SlottedStore
from ..params.store import ParamStore, ResidentStore
from ..units.find import UnitSpec
from ..units.plan import ZeroPlan
from ..units.unit import ParamUnit, group_by
from .buffers import UnitBuffers
from .placement import ON_DEVICE, Placement
from .values import check_not_copies, check_parts_are_here


def build_units(
    specs: Sequence[UnitSpec],
    plan: ZeroPlan,
    replicas_of: Callable[[RankPlacement], Collectives],
    *,
    precision: PrecisionPolicy,
    device: torch.device,
    group_of: Mapping[int, int],
    memory: Arenas | None = None,
    placement: Placement = ON_DEVICE,
) -> list[ParamUnit]:
    """Takes the parameters' values into flat buffers on `device`; the parameters become views of them.

    Values are rank 0's, by one broadcast a unit. Parameters in slices are gathered one by one instead, and what files
    hold is read by the rank that owns it; below stage 3 an all-gather a unit then brings it to the others. Unit by
    unit, the model's first tensors make room; at stage 3 only one unit at a time is held whole.

    Args:
        specs: the units found in the model.
        plan: plan of what is sharded.
        replicas_of: function that returns the ranks that hold the same elements, of the placement of a unit.
        precision: dtypes of parameters and masters.
        device: device of the buffers.
        group_of: id of a parameter to the number of its optimizer group.
        memory: arenas that the buffers are reserved in; None: in arenas of their own.
        placement: Place of slices and masters.

    Raises:
        ModelError: a parameter is a copy of a sharded one, or is cut over an axis and has no values yet.
    """
    for spec in specs:
        check_not_copies(spec)
        check_parts_are_here([(name, param, spec.placement) for name, param in spec.params])
    units = [
        ParamUnit(group_by(spec, group_of), replicas_of(spec.placement), index=index)
        for index, spec in enumerate(specs)
    ]
    memory = memory or Arenas()
    for unit, stays_here in zip(units, placement.staying(units), strict=True):
        unit.steps_on_host = not stays_here
    leaving = [unit for unit in units if unit.steps_on_host]
    if placement.masters_away is not None and leaving:
        shards = [unit.layout.shard_numel for unit in leaving]
        placement.masters_away.reserve([unit.label for unit in leaving], shards, precision.master, precision.states)
    filled: list[UnitBuffers] = []
    for dtype, lies in dict.fromkeys((spec.dtype, spec.placement) for spec in specs):
        members = [
            unit for unit, spec in zip(units, specs, strict=True) if (spec.dtype, spec.placement) == (dtype, lies)
        ]
        buffers = UnitBuffers(
            members,
            plan,
            precision=precision if dtype is None else replace(precision, compute=dtype),
            device=device,
            memory=memory,
            suffix=("" if dtype is None else in_dtype(dtype)) + in_cut(lies),
            placement=placement,
            positions={unit.index: position for position, unit in enumerate(leaving)},
        )
        for unit in members:
            buffers.fill(unit)
        filled.append(buffers)
    for buffers in filled:
        buffers.add_sums()
    return units


def build_store(
    units: Sequence[ParamUnit],
    plan: ZeroPlan,
    collectives: Collectives,
    *,
    gathering: GatherPlan | None = None,
    poison: bool = False,
    memory: Arenas | None = None,
) -> ParamStore:
    """Returns the store that the plan asks for; see `SlottedStore` for the other arguments.

    `collectives` are the ranks that have the same units, and gather them in one order.

    Where no unit has parameters, as in a model without blocks that is all frozen, there is nothing to gather.
    """
    if not plan.shard_parameters or not units:
        return ResidentStore()
    return SlottedStore(units, collectives, plan=gathering, poison=poison, arenas=memory)
