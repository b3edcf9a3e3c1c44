"""After the optimizer: new master values become the parameters that the next forward reads."""

from __future__ import annotations

from collections.abc import Sequence

from ...mesh.collectives import Pending
from ..units.plan import ZeroPlan
from ..units.unit import ParamUnit
from .store import ParamStore


def publish(units: Sequence[ParamUnit], plan: ZeroPlan, store: ParamStore) -> None:
    """Writes master shards into the compute parameters, rounding where the dtypes differ.

    Stages 1 and 2 enter one all-gather a unit, all under way at once; stage 0 has every value already, and stage 3
    gathers the rest unit now and the others when they are next used.

    Args:
        units: all units, after the optimizer's step.
        plan: plan of what is sharded.
        store: parameter store, which is told that gathered copies are stale.
    """
    write_parameters(units, plan)
    if plan.shard_optimizer and not plan.shard_parameters:
        pending: list[Pending] = [
            unit.replicas.all_gather(unit.flat_param, unit.shard, label=unit.label) for unit in units
        ]
        for work in pending:
            work.wait()
    store.invalidate()
    if plan.shard_parameters:
        # The rest unit keeps a slot to itself: fresh from here on, also for calls that pass the engine by
        # (`engine.module(x)`, a `generate` method of the model).
        for unit in units:
            if unit.module is None:
                store.acquire(unit)
                store.release(unit)


def write_parameters(units: Sequence[ParamUnit], plan: ZeroPlan) -> None:
    """Writes master shards into this rank's own part of the parameters, where these are not the masters themselves.

    Args:
        units: units, after the optimizer's step.
        plan: plan of what is sharded.
    """
    for unit in units:
        if unit.tier is not None:
            if unit.halves is None and unit.master.data_ptr() != unit.shard.data_ptr():
                unit.tier.write(unit.index, unit.master)
            continue
        target = unit.shard if plan.shard_optimizer else unit.flat_param
        if target.data_ptr() != unit.master.data_ptr():
            target.copy_(unit.master)
