"""A model as a checkpoint takes it: this rank's pieces of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from dsrun.checkpoint_files.index.region import uncut

from ...protocols import Holders, StateEntry
from ...zero.creation.pretrained import persistent_buffers
from ...zero.partition_parameters import memory_of
from ...zero.units.trained import is_trained
from ...zero.units.unit import ParamUnit


def parameter_entries(
    model: nn.Module,
    units: Sequence[ParamUnit],
    *,
    everyone: Holders,
    frozen: bool = True,
    frozen_units: Sequence[ParamUnit] = (),
    elsewhere: Collection[str] = (),
) -> list[StateEntry]:
    """Returns this rank's pieces of all parameters and persistent buffers.

    Args:
        model: model that holds the buffers, and frozen parameters that every rank holds whole.
        units: units of the trainable parameters, which are saved as fp32 masters.
        everyone: all ranks of this one's stage, of which each holds buffers and such frozen parameters whole.
        frozen: whether frozen parameters are included.
        frozen_units: units of the frozen parameters that each rank has a slice of, in compute dtype.
        elsewhere: names of frozen parameters that another pipeline stage saves under another name; they are left out.
    """
    entries: list[StateEntry] = []
    for unit in units:
        entries += unit_entries(unit, unit.whole_master())
    if frozen:
        entries += frozen_entries(model, everyone=everyone, frozen_units=frozen_units, elsewhere=elsewhere)
    entries += [
        _whole(name, "buffer", memory_of(buffer), everyone) for name, buffer in persistent_buffers(model).items()
    ]
    return entries


def frozen_entries(
    model: nn.Module, *, everyone: Holders, frozen_units: Sequence[ParamUnit], elsewhere: Collection[str] = ()
) -> list[StateEntry]:
    """Returns this rank's pieces of the parameters that are not trained; see `parameter_entries`."""
    entries = [entry for unit in frozen_units for entry in unit_entries(unit, unit.master)]
    cut = {id(param) for unit in frozen_units for param in unit.params}
    for name, param in model.named_parameters():
        if not is_trained(param) and id(param) not in cut:
            entries.append(_whole(name, "param", memory_of(param), everyone))
    return [entry for entry in entries if entry.name not in elsewhere]


def wanted_tensors(
    model: nn.Module,
    *,
    whole_shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[int, str] | None = None,
    frozen: bool = True,
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns (name, role, whole shape) of every parameter and persistent buffer of the model, on whichever rank.

    Args:
        model: the model.
        whole_shapes: shapes of the whole parameters of which the model may have parts, by name; see `whole_shapes`.
        stored: names that parameters are stored under, see `stored_names`; None: those of the model.
        frozen: whether frozen parameters are included.
    """
    of = stored or {}
    parameters = [
        (of.get(id(param), name), param) for name, param in model.named_parameters() if frozen or is_trained(param)
    ]
    wanted = [(name, "param", whole_shapes.get(name, tuple(param.shape))) for name, param in parameters]
    wanted += [(name, "buffer", tuple(buffer.shape)) for name, buffer in persistent_buffers(model).items()]
    return wanted


def whole_shapes(units: Sequence[ParamUnit]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the whole parameters that units have, or have parts of, by name."""
    return {extent.name: extent.whole.shape for unit in units for extent in unit.layout.extents}


def stored_names(model: nn.Module, units: Sequence[ParamUnit] = ()) -> dict[int, str]:
    """Returns the name that each parameter is stored under, by its id.

    Args:
        model: the model.
        units: units of its parameters, which know the names of what several parts of a pipeline use.
    """
    found = {id(param): name for name, param in model.named_parameters()}
    for unit in units:
        found.update((id(p), extent.name) for p, extent in zip(unit.params, unit.layout.extents, strict=True))
    return found


def tied_names(model: nn.Module, units: Sequence[ParamUnit] = (), *, frozen: bool = True) -> dict[str, str]:
    """Returns the further names of parameters that have several, each with the name it is stored under.

    Args:
        model: the model.
        units: units of its parameters, see `stored_names`.
        frozen: whether frozen parameters are included.
    """
    stored = stored_names(model, units)
    return {
        name: stored[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if name != stored[id(param)] and (frozen or is_trained(param))
    }


def unit_entries(unit: ParamUnit, master_N: Tensor) -> list[StateEntry]:
    """Returns this rank's pieces of a unit's parameters.

    Args:
        unit: unit that has the parameters.
        master_N: the values, see `ParamUnit.whole_master`.
    """
    entries: list[StateEntry] = []
    for piece in unit.layout.pieces(*unit.owned):
        flat = master_N.narrow(0, piece.shard_offset, piece.stop - piece.start)
        extent = piece.extent
        entries.append(StateEntry(extent.name, "param", extent.whole, piece.start, piece.stop, flat, unit.holders))
    for extent in unit.layout.extents:
        if not prod(extent.whole.shape):  # in no rank's range, yet a part of the model
            entries.append(StateEntry(extent.name, "param", extent.whole, 0, 0, master_N.narrow(0, 0, 0), unit.ranks))
    return entries


def _whole(name: str, role: str, tensor: Any, holders: Holders) -> StateEntry:
    return StateEntry(name, role, uncut(tensor.shape), 0, tensor.numel(), tensor.view(-1), holders)
