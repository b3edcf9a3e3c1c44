"""The engine's state as a checkpoint takes it: pieces of tensors, and counters as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from ..protocols import StateEntry
from ..zero.creation.pretrained import persistent_buffers
from ..zero.partition_parameters import memory_of
from ..zero.units.trained import is_trained
from ..zero.units.unit import ParamUnit


@dataclass(slots=True)
class Counters:
    """How far training has come.

    Attributes:
        micro_steps: calls of `step`.
        global_steps: optimizer steps, skipped ones included.
        global_samples: samples of all ranks in those steps.
        skipped_steps: steps whose update was left out because a gradient was not finite.
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    def to_json(self) -> dict[str, int]:
        """Returns the counters by name."""
        return asdict(self)

    def load(self, values: dict[str, Any]) -> None:
        """Takes over what `to_json` returned."""
        for name in self.to_json():
            setattr(self, name, int(values[name]))


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
        model: for buffers and frozen parameters that every rank holds whole.
        units: for trainable parameters, as fp32 masters.
        replicated: every rank owns every unit whole (stage 0).
        frozen: include frozen parameters.
        frozen_units: for those of which each rank has a slice, in compute dtype.
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
        frozen: include frozen parameters.
    """
    parameters = [(name, param) for name, param in model.named_parameters() if frozen or is_trained(param)]
    wanted = [(name, "param", tuple(param.shape)) for name, param in parameters]
    wanted += [(name, "buffer", tuple(buffer.shape)) for name, buffer in persistent_buffers(model).items()]
    return wanted


def tied_names(model: nn.Module, *, frozen: bool = True) -> dict[str, str]:
    """Returns the further names of parameters that have several, each with the name it is stored under.

    Args:
        model: the model.
        frozen: include frozen parameters.
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
        unit: of them.
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
