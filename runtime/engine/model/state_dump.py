"""What an engine is, one key a line (`dump_state`): its config as it was read, axes, units and places. Only tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from torch import optim

from dsrun.config.show.resolved import rows
from dsrun.contract.monitor_records import is_secret

from ...mesh.join.groups import ProcessGroupMesh
from ...observe.memory import StatePrediction
from .sharded import ShardedModel

#: Ends of names of keys whose value is nobody's business.
_SECRETS = ("api_key", "token", "password", "secret")
_MASK = "***"


def tell_state(
    sharded: ShardedModel,
    mesh: ProcessGroupMesh,
    optimizer: optim.Optimizer | None,
    *,
    predicted: StatePrediction,
    say: Callable[[str], None],
) -> None:
    """Says what an engine is, where its config asks for it: each line a dotted key with its value as JSON.

    Args:
        sharded: the model, with the config as it was resolved.
        mesh: ranks and device.
        optimizer: optimizer over this rank's shards; None for an engine that only evaluates.
        predicted: model state of this rank between steps.
        say: function that prints a line on the first rank.
    """
    if sharded.settings.dump_state and mesh.is_first:
        bytes_of = {"state_bytes": predicted.total_bytes(), "host_bytes": predicted.host_bytes()}
        told = (*_values(mesh, sharded, optimizer), *((f"predicted.{name}", n) for name, n in bytes_of.items()))
        say("\n".join(f"dsrun: state: {key} = {json.dumps(value, default=str)}" for key, value in told))


def _values(
    mesh: ProcessGroupMesh, sharded: ShardedModel, optimizer: optim.Optimizer | None
) -> Iterator[tuple[str, Any]]:
    for row in rows(sharded.settings):
        secret = row.path.endswith(_SECRETS) or is_secret(row.path, row.value)
        yield f"config.{row.path}", _MASK if row.value and secret else row.value
    yield "mesh.world_size", mesh.info.world_size
    yield "mesh.backend", mesh.backend
    yield "mesh.device", str(mesh.device)
    for axis in mesh.spec.axes:
        yield f"mesh.axes.{axis.name}", axis.size
    for name in ("optimizer", "gradients", "parameters"):
        yield f"sharded.{name}", getattr(sharded.plan, f"shard_{name}")
    for name in ("compute", "master", "sums", "states"):
        yield f"precision.{name}", _dtype(getattr(sharded.precision, name))
    for unit in (*sharded.units, *sharded.frozen):
        kept = "slices off the device" if unit.tier is not None else "device"
        stepped = "host" if unit.steps_on_host else "device"
        where = {"parameters": kept, "step": stepped} if unit.trains else {"parameters": kept, "step": "frozen"}
        numel = sum(prod(extent.shape) for extent in unit.layout.extents)
        yield f"units.{unit.index}", {"name": unit.name, "parameters": numel, "where": where}
    if optimizer is None:
        yield "optimizer", None
        return
    yield "optimizer.class", type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        plain = {name: value for name, value in group.items() if isinstance(value, int | float | str | bool | tuple)}
        yield f"optimizer.groups.{number}", {"tensors": len(group["params"]), **plain}


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
