"""A unit's first values: the model's own on rank 0, slices that `zero.Init` or an earlier engine left, or files.

Brings them into one flat buffer; what buffers become of it is decided in `units.py` and `frozen.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError, Problem

from ...layout.cuts import RankPlacement, are_cut
from ...mesh.collectives import Collectives, own_slice
from ..access.pieces import UnitHome
from ..partition_parameters import ShardedParameter, home_of, is_zero_param, unsettle
from ..units.find import UnitSpec
from ..units.unit import ParamUnit
from .stored_files import StoredHome
from .unbuilt import UnbuiltOwner


def check_not_copies(spec: UnitSpec) -> None:
    """Refuses parameters that say they are sharded and have no home: a deep copy leaves the values behind.

    Raises:
        ModelError: naming the first of them.
    """
    for name, param in spec.params:
        if isinstance(param, ShardedParameter) and home_of(param) is None:
            raise ModelError(
                f"model: `{name}` is a copy of a sharded parameter, without its values",
                hint="build the model itself inside dsrun.zero.Init instead of copying one",
            )


def check_parts_are_here(params: Sequence[tuple[str, nn.Parameter, RankPlacement]]) -> None:
    """Refuses parameters that an axis has cut before they had values: who gives them knows whole parameters only.

    Args:
        params: name, parameter and placement of each.

    Raises:
        ModelError: naming them.
    """
    hint = "build the model on a CPU or GPU, outside of dsrun.zero.Init, with its values in it"
    problems = [
        Problem(f"model: {are_cut([name], placement)}, and its values are not there yet", hint)
        for name, param, placement in params
        if placement.cut_over and (param.is_meta or _is_elsewhere(param))
    ]
    if problems:
        raise ModelError.of(problems)


def take_values(unit: ParamUnit, whole_N: Tensor, *, device: torch.device) -> bool:
    """Takes the values of a unit's parameters into a flat buffer, converting dtype and device.

    One broadcast a unit for what ranks have whole; parameters in slices are gathered one by one. What files hold is
    read by the rank that owns it, into its own slice alone. Parameters lose their former homes.

    Args:
        unit: the unit; nothing of it is changed but the homes.
        whole_N: [padded_numel] in any floating dtype, zeroed; overwritten.
        device: device for the parameters that files have promised values for, from now on.

    Returns:
        whether some values stand in their owner's slice only.
    """
    replicas = unit.replicas
    mine = own_slice(whole_N, rank=replicas.rank, size=replicas.size)
    views = list(zip(unit.params, unit.views(whole_N), unit.layout.extents, strict=True))
    built = [(param, view) for param, view, _ in views if not _is_elsewhere(param)]
    for param, view in built:
        view.copy_(param.detach())
    if built:
        replicas.broadcast(whole_N, source=0, label=unit.label).wait()
    start, stop = unit.layout.shard_range(replicas.rank)
    promised = False
    for param, view, extent in views:
        home = home_of(param)
        if isinstance(home, UnbuiltOwner):
            view.copy_(home.nursery.give(home))
        elif isinstance(home, UnitHome) and is_zero_param(param):
            view.copy_(home.access.pieces.hand_over(home, replicas))
        elif isinstance(home, StoredHome):
            promised = True
            first, last = max(start, extent.offset), min(stop, extent.offset + extent.numel)
            if first < last:
                mine.narrow(0, first - start, last - first).copy_(
                    home.stored.read(first - extent.offset, last - extent.offset)
                )
            home.keep(device)
    return promised


def whole_values(param: nn.Parameter, replicas: Collectives, *, device: torch.device) -> Tensor | None:
    """Returns the whole values of a parameter that are elsewhere, and makes it an ordinary parameter without them.

    Every rank must call, for the same parameters in one order: slices are gathered.

    Args:
        param: a parameter.
        replicas: ranks that hold it.
        device: device that collectives work on.

    Returns:
        The values, in memory of their own; None where they are in the parameter.
    """
    home = home_of(param)
    if isinstance(home, UnbuiltOwner):
        return home.nursery.give(home)
    if isinstance(home, UnitHome) and is_zero_param(param):
        whole = home.access.pieces.hand_over(home, replicas).to(param.dtype)
        unsettle(param)
        return whole
    if isinstance(home, StoredHome):
        whole = home.stored.read(0, param.numel()).view(param.shape).to(device, param.dtype)
        home.keep(device)
        return whole
    return None


def _is_elsewhere(param: Tensor) -> bool:
    """Whether a parameter's values are in slices, in a file, or in the shards of an engine that is gone."""
    return is_zero_param(param) or isinstance(home_of(param), StoredHome)
