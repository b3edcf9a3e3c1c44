"""From a model to units with memory: values agreed over ranks, buffers cut as the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..mesh.collectives import Collectives, own_slice
from ..precision.policy import PrecisionPolicy
from .plan import ZeroPlan
from .store import ParamStore, ResidentStore, SlottedStore
from .unit import ParamUnit, group_by
from .units import UnitSpec
from .values import check_not_copies, take_values


def build_units(
    specs: Sequence[UnitSpec],
    plan: ZeroPlan,
    collectives: Collectives,
    *,
    precision: PrecisionPolicy,
    device: torch.device,
    group_of: Mapping[int, int],
) -> list[ParamUnit]:
    """Takes the parameters' values into flat buffers on `device`; the parameters become views of them.

    Values are rank 0's, by one broadcast a unit. Parameters in slices are gathered one by one instead, and what files
    hold is read by the rank that owns it; below stage 3 an all-gather a unit then brings it to the others. At stage 3
    only one unit at a time is held whole.

    Args:
        specs: the units found in the model.
        plan: what is sharded.
        collectives: the axis to shard over.
        precision: dtypes of parameters and masters.
        device: where the buffers live.
        group_of: id of a parameter to the number of its optimizer group.

    Raises:
        ModelError: a parameter is a copy of a sharded one.
    """
    for spec in specs:
        check_not_copies(spec)
    units: list[ParamUnit] = []
    for index, spec in enumerate(specs):
        unit = ParamUnit(group_by(spec, group_of), index=index, world_size=collectives.size)
        _fill(unit, plan, collectives, precision=precision, device=device)
        units.append(unit)
    return units


def _fill(
    unit: ParamUnit,
    plan: ZeroPlan,
    collectives: Collectives,
    *,
    precision: PrecisionPolicy,
    device: torch.device,
) -> None:
    whole = torch.zeros(unit.layout.padded_numel, dtype=precision.master, device=device)
    mine = own_slice(whole, rank=collectives.rank, size=collectives.size)
    promised = take_values(unit, whole, collectives, device=device)
    if promised and not plan.shard_parameters:
        collectives.all_gather(whole, mine, of=unit.label).wait()

    def readable_by_all(values: Tensor) -> Tensor:
        return collectives.zeros(values.numel(), dtype=precision.compute, device=device).copy_(values)

    if plan.shard_parameters:
        unit.shard = readable_by_all(mine)
        # The model's first tensors must not live on until the slots exist.
        for param in unit.params:
            param.data = torch.empty(0, dtype=precision.compute, device=device)
    else:
        flat = readable_by_all(whole)
        unit.shard = own_slice(flat, rank=collectives.rank, size=collectives.size)
        unit.bind_params(flat)
    if precision.has_separate_master:
        unit.master = mine.clone() if plan.shard_optimizer else whole
    else:
        unit.master = unit.shard if plan.shard_optimizer else unit.flat_param
    unit.owned = unit.layout.shard_range(collectives.rank) if plan.shard_optimizer else (0, unit.layout.padded_numel)
    unit.grad_sum = torch.zeros(unit.owned[1] - unit.owned[0], dtype=precision.master, device=device)


def build_store(
    units: Sequence[ParamUnit],
    plan: ZeroPlan,
    collectives: Collectives,
    *,
    prefetch: bool = True,
    poison: bool = False,
) -> ParamStore:
    """Returns the store that the plan asks for; see `SlottedStore` for `prefetch` and `poison`."""
    if not plan.shard_parameters:
        return ResidentStore()
    return SlottedStore(units, collectives, prefetch=prefetch, poison=poison)
