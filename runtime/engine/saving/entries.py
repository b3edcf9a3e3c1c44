"""A model as a checkpoint takes it: this rank's pieces of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...protocols import StateEntry
from ...zero.creation.pretrained import persistent_buffers
from ...zero.partition_parameters import memory_of
from ...zero.units.trained import is_trained
from ...zero.units.unit import ParamUnit


def parameter_entries(
    model: nn.Module,
    units: Sequence[ParamUnit],
    *,
    replicated: bool,
    frozen: bool = True,
    frozen_units: Sequence[ParamUnit] = (),
) -> list[StateEntry]:
    """Returns this rank's pieces of all parameters and persistent buffers.

    Args:
        model: model that holds the buffers, and frozen parameters that every rank holds whole.
        units: units of the trainable parameters, which are saved as fp32 masters.
        replicated: every rank owns every unit whole (stage 0).
        frozen: whether frozen parameters are included.
        frozen_units: units of the frozen parameters that each rank has a slice of, in compute dtype.
    """
    entries: list[StateEntry] = []
    for unit in units:
        entries += unit_entries(unit, unit.whole_master(), replicated=replicated)
    if frozen:
        entries += frozen_entries(model, replicated=replicated, frozen_units=frozen_units)
    entries += [_whole(name, "buffer", memory_of(buffer)) for name, buffer in persistent_buffers(model).items()]
    return entries


def frozen_entries(model: nn.Module, *, replicated: bool, frozen_units: Sequence[ParamUnit]) -> list[StateEntry]:
    """Returns this rank's pieces of the parameters that are not trained; see `parameter_entries`."""
    entries = [entry for unit in frozen_units for entry in unit_entries(unit, unit.master, replicated=replicated)]
    cut = {id(param) for unit in frozen_units for param in unit.params}
    for name, param in model.named_parameters():
        if not is_trained(param) and id(param) not in cut:
            entries.append(_whole(name, "param", memory_of(param)))
    return entries


def wanted_tensors(model: nn.Module, *, frozen: bool = True) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns (name, role, shape) of every parameter and persistent buffer of the model, on whichever rank.

    Args:
        model: the model.
        frozen: whether frozen parameters are included.
    """
    parameters = [(name, param) for name, param in model.named_parameters() if frozen or is_trained(param)]
    wanted = [(name, "param", tuple(param.shape)) for name, param in parameters]
    wanted += [(name, "buffer", tuple(buffer.shape)) for name, buffer in persistent_buffers(model).items()]
    return wanted


def tied_names(model: nn.Module, *, frozen: bool = True) -> dict[str, str]:
    """Returns the further names of parameters that have several, each with the name it is stored under.

    Args:
        model: the model.
        frozen: whether frozen parameters are included.
    """
    first = {id(param): name for name, param in model.named_parameters() if frozen or is_trained(param)}
    return {
        name: first[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if name != first.get(id(param), name)
    }


def unit_entries(unit: ParamUnit, master_N: Tensor, *, replicated: bool) -> list[StateEntry]:
    """Returns this rank's pieces of a unit's parameters.

    Args:
        unit: unit that has the parameters.
        master_N: the values, see `ParamUnit.whole_master`.
        replicated: every rank owns the unit whole.
    """
    entries: list[StateEntry] = []
    for piece in unit.layout.pieces(*unit.owned):
        flat = master_N.narrow(0, piece.shard_offset, piece.stop - piece.start)
        extent = piece.extent
        entries.append(StateEntry(extent.name, "param", extent.shape, piece.start, piece.stop, flat, replicated))
    for extent in unit.layout.extents:
        if extent.numel == 0:  # in no rank's range, yet a part of the model
            entries.append(StateEntry(extent.name, "param", extent.shape, 0, 0, master_N.narrow(0, 0, 0), True))
    return entries


def _whole(name: str, role: str, tensor: Any) -> StateEntry:
    return StateEntry(name, role, tuple(tensor.shape), 0, tensor.numel(), tensor.view(-1), True)
