"""Finding the units of a model: which parameters are gathered, reduced and updated together.

Works on the module tree alone: no buffers, no collectives.

[Note: units]
- Each block of a repeated stack (a ModuleList or Sequential with two or more children of one class) is a unit. A stack
  of ModuleLists, which are never called themselves, is looked into.
- Outside of blocks, each embedding, Linear and torch attention with its own parameters is a unit, if it is large
  enough. (Attention is one unit, for it reads the weights of a child that it never calls.)
- A leaf module is a unit; see [Note: leaf modules].
- All other parameters form the *rest* unit: small ones, parameters of the root itself, and tied weights, which are
  used in several places. A unit with a `module` is needed from the start to the end of that module's forward; the rest
  unit has none and is needed for the whole forward and backward.
Frozen parameters are not in these units. Those that a unit's module has to itself may become a unit of their own,
gathered together with it (stage 3). The others stay whole on every rank: they would be needed from the first to the
last moment, so a slice beside the whole would save nothing.
Parameters that stay in fp32 where the others have 16 bits are in no module's unit either: all of them that are trained
form a rest unit of their own, and the frozen ones stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..stacks import is_stack
from .leaves import is_leaf
from .partition_parameters import ShardedParameter

REST = "rest"
#: The rest unit of parameters that stay in fp32.
KEPT = "rest in fp32"
#: Leaf modules outside of blocks with fewer parameters are not worth a gather of their own.
_SMALL_NUMEL = 4096


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit, before it has buffers.

    Attributes:
        name: the module's qualified name, or `rest`.
        module: whose forward uses the parameters; None for the rest unit.
        params: (qualified name, parameter), each parameter of the model in one unit only.
        dtype: that the parameters stay in; None: the one that the model computes in.
        wire: dtype that gradients travel in; None: that of all others.
    """

    name: str
    module: nn.Module | None
    params: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype | None = None
    wire: torch.dtype | None = None


def find_units(
    model: nn.Module, *, kept: Collection[int] = (), light: Collection[int] = (), wire: torch.dtype | None = None
) -> list[UnitSpec]:
    """Groups the trainable parameters of `model` into units, see [Note: units].

    Args:
        model: the model.
        kept: ids of parameters that stay in fp32 where the others have 16 bits.
        light: ids of parameters whose gradients may travel in `wire`. A module's unit that has some has no others:
            these are in the rest unit, which travels as ever, whatever is in it.
        wire: see `light`.

    Returns:
        units with modules in order of registration; the rest units last, and only where they have parameters.
    """

    def is_wanted(param: nn.Parameter) -> bool:
        return param.requires_grad and id(param) not in kept

    units = [unit for whole in _modules_with_params(model) if (unit := _only(whole, is_wanted)).params]
    if light:
        units = [_lightened(unit, light, wire) for unit in units]
    taken = {id(param) for unit in units for _, param in unit.params}
    rest = [(name, param) for name, param in model.named_parameters() if param.requires_grad and id(param) not in taken]
    for name, dtype in ((REST, None), (KEPT, torch.float32)):
        params = tuple(item for item in rest if (id(item[1]) in kept) is (dtype is not None))
        if params:
            units.append(UnitSpec(name, None, params, dtype))
    return units


def find_frozen_units(model: nn.Module, *, kept: Collection[int] = ()) -> list[UnitSpec]:
    """Groups the frozen parameters of modules that are units, trained ones in them or not; see [Note: units].

    Parameters of a class of their own and those that hold no floating numbers (quantised weights) are left out: what is
    in them is more than their elements.

    Args:
        model: the model.
        kept: ids of parameters that stay in fp32; they are left out too.

    Returns:
        units in order of registration, none for what no module has to itself.
    """
    units = [_only(whole, lambda p: _may_be_cut(p) and id(p) not in kept) for whole in _modules_with_params(model)]
    return [unit for unit in units if unit.params]


def _may_be_cut(param: nn.Parameter) -> bool:
    has_values = param.is_floating_point() and param.numel() > 0
    return not param.requires_grad and has_values and type(param) in (nn.Parameter, ShardedParameter)


def _only(unit: UnitSpec, wanted: Callable[[nn.Parameter], bool]) -> UnitSpec:
    return UnitSpec(unit.name, unit.module, tuple((name, param) for name, param in unit.params if wanted(param)))


def _lightened(unit: UnitSpec, light: Collection[int], wire: torch.dtype | None) -> UnitSpec:
    """Returns the unit with those of its parameters alone that may travel in `wire`; as it is where there are none."""
    params = tuple(item for item in unit.params if id(item[1]) in light)
    return UnitSpec(unit.name, unit.module, params, unit.dtype, wire) if params else unit


def _modules_with_params(model: nn.Module) -> Iterator[UnitSpec]:
    """Yields the modules that may become units, each with the parameters that it alone has."""
    names = {id(param): name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}
    homes: dict[int, set[str]] = {}
    candidates = list(_candidates(model))
    for unit_name, module in candidates:
        for param in module.parameters():
            homes.setdefault(id(param), set()).add(unit_name)
    used_elsewhere = _used_outside(model, [module for _, module in candidates])
    for unit_name, module in candidates:
        own = [param for param in module.parameters() if len(homes[id(param)]) == 1 and id(param) not in used_elsewhere]
        yield UnitSpec(unit_name, module, tuple((names[id(param)], param) for param in own))


def _candidates(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) inside `module` that may become units; none contains another."""
    if is_leaf(module):
        return
    blocks = is_stack(module)
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if blocks or (is_leaf(child) and not isinstance(child, nn.ModuleList | nn.ModuleDict)):
            yield name, child
        elif isinstance(child, nn.Embedding | nn.Linear | nn.MultiheadAttention):
            if sum(param.numel() for param in child.parameters()) >= _SMALL_NUMEL:
                yield name, child
        else:
            yield from _candidates(child, f"{name}.")


def _used_outside(model: nn.Module, units: list[nn.Module]) -> set[int]:
    """Ids of parameters that a module outside of every unit holds as well."""
    inside = {id(module) for unit in units for module in unit.modules()}
    return {
        id(param)
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    }
