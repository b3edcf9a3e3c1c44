"""Finding the units of a model: which parameters are gathered, reduced and updated together.

Works on the module tree alone: no buffers, no collectives.

[Note: units]
- Each block of a stack is a unit; what a block is, is said in `stacks.py`. A list of ModuleLists, which are never
  called themselves, is looked into.
- A block with a part that other blocks have too is looked into: the shared part is one unit for all of them, and so is
  each of its own parts. Parts are shared as the same module, or as several with the same parameters (tied).
- Outside of blocks, each embedding, Linear and torch attention with its own parameters is a unit, if it is large
  enough. (Attention is one unit, for it reads the weights of a child that it never calls.)
- A leaf module is a unit; see [Note: leaf modules].
- All other parameters form the *rest* unit: small ones, parameters of the root itself, and tied weights, which are
  used in several places. A unit with a `module` is needed from the start to the end of that module's forward; the rest
  unit has none and is needed for the whole forward and backward.
Frozen parameters are not in these units. Those that a unit's module has to itself may become a unit of their own,
gathered together with it (stage 3). The others stay whole on every rank: they would be needed from the first to the
last moment, so a slice beside the whole would save nothing.
Parameters of a unit lie alike on the ranks (`layout/cuts.py`): of a block that an axis has cut in part, those of one
placement are the block's unit, as most of its elements are, and the others are in a rest unit of their placement. Every
rank must find the same units, so sizes are those of whole parameters: ranks may have parts of unlike sizes.
A parameter that several parts of a pipeline use is a rest unit of its own, under the name of its first use: it is the
same unit on all of their ranks, and where one rank has all parts. These units come last, by name.
A frozen parameter that is cut is refused, for whatever stays whole has one value on all ranks.
Parameters that stay in fp32 where the others have 16 bits are in no module's unit either: all of them that are trained
form a rest unit of their own, and the frozen ones stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dsrun.checkpoint_files.index.region import TensorBoxes
from dsrun.errors import ModelError, Problem

from ...layout.cuts import (
    EVERYWHERE,
    NO_CUTS,
    Cuts,
    RankPlacement,
    are_cut,
    boxes_of,
    in_cut,
    is_shared,
    name_of,
    placement_of,
    whole_numel,
)
from ...stacks import SMALL_NUMEL, blocks_of
from ..partition_parameters import is_ordinary
from .leaves import is_leaf
from .trained import is_trained

REST = "rest"
#: The rest unit of parameters that stay in fp32.
KEPT = "rest in fp32"


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit, before it has buffers.

    Attributes:
        name: the module's qualified name, or `rest`.
        module: module that uses the parameters in its forward; None for the rest unit.
        params: (qualified name, parameter), each parameter of the model in one unit only.
        dtype: dtype that the parameters stay in; None: the dtype that the model computes in.
        comm_dtype: dtype that gradients travel in; None: that of all others.
        twins: other modules that have the same parameters, all of them.
        placement: axes of ranks that the parameters are no plain replicas along.
        boxes: boxes of whole parameters that this rank has, by name; it has all of those that are not named.
    """

    name: str
    module: nn.Module | None
    params: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype | None = None
    comm_dtype: torch.dtype | None = None
    twins: tuple[nn.Module, ...] = ()
    placement: RankPlacement = EVERYWHERE
    boxes: Mapping[str, TensorBoxes] = field(default_factory=dict[str, TensorBoxes])


def find_units(
    model: nn.Module,
    *,
    kept: Collection[int] = (),
    light: Collection[int] = (),
    comm_dtype: torch.dtype | None = None,
    cuts: Cuts = NO_CUTS,
    piece_of: Callable[[str], str] | None = None,
) -> list[UnitSpec]:
    """Groups the trainable parameters of `model` into units, see [Note: units].

    Args:
        model: the model.
        kept: ids of parameters that stay in fp32 where the others have 16 bits.
        light: ids of parameters whose gradients may travel in `comm_dtype`. A module's unit that has some has no
            others: these are in the rest unit, which travels as ever, whatever is in it.
        comm_dtype: dtype that the gradients of the parameters in `light` may travel in; None: that of all others.
        cuts: parameters that an axis beside data has changed.
        piece_of: function that returns for the name of a parameter that of its piece of the model: what is in a
            rest unit lies in one piece, so that units are the same however many pieces a rank has. None: one piece.

    Returns:
        units with modules in order of registration; then rest units, only where they have parameters; then those of
        parameters that several parts of a pipeline use, by name.

    Raises:
        ModelError: naming every parameter that an axis has cut and nobody trains.
    """
    _check_cut_are_trained(model, cuts)

    def is_wanted(param: nn.Parameter) -> bool:
        return is_trained(param) and id(param) not in kept

    units = [unit for whole in _modules_with_params(model, cuts) if (unit := _only(whole, is_wanted)).params]
    if light:
        units = [_lightened(unit, light, comm_dtype) for unit in units]
    units = [one for unit in units if (one := _placed_alike(unit, cuts)).params]
    taken = {id(param) for unit in units for _, param in unit.params}
    rest = [(name, param) for name, param in model.named_parameters() if is_trained(param) and id(param) not in taken]
    shared = [item for item in rest if is_shared(item[1], cuts)]
    rest = [item for item in rest if not is_shared(item[1], cuts)]
    for name, dtype in ((REST, None), (KEPT, torch.float32)):
        params = [item for item in rest if (id(item[1]) in kept) is (dtype is not None)]
        for placement, piece in dict.fromkeys(_lies(item, cuts, piece_of) for item in params):
            alike = tuple(item for item in params if _lies(item, cuts, piece_of) == (placement, piece))
            in_piece = "" if piece is None else f" of {piece}"
            units.append(UnitSpec(name + in_cut(placement) + in_piece, None, alike, dtype, placement=placement))
    for name, param in sorted(((name_of(*item, cuts), item[1]) for item in shared), key=lambda item: item[0]):
        placement, dtype = placement_of(param, cuts), torch.float32 if id(param) in kept else None
        label = f"{KEPT if dtype is not None else REST} `{name}`" + in_cut(placement)
        units.append(UnitSpec(label, None, ((name, param),), dtype, placement=placement))
    return [replace(unit, boxes=boxes_of(unit.params, cuts)) for unit in units] if cuts else units


def _lies(
    item: tuple[str, nn.Parameter], cuts: Cuts, piece_of: Callable[[str], str] | None
) -> tuple[RankPlacement, str | None]:
    """Returns where a parameter lies that is in no module's unit: those that lie alike are in one rest unit."""
    return placement_of(item[1], cuts), None if piece_of is None else piece_of(item[0])


def find_frozen_units(model: nn.Module, *, kept: Collection[int] = (), cuts: Cuts = NO_CUTS) -> list[UnitSpec]:
    """Groups the frozen parameters of modules that are units, trained ones in them or not; see [Note: units].

    Parameters of a class of their own and those that hold no floating numbers (quantised weights) are left out: what is
    in them is more than their elements.

    Args:
        model: the model.
        kept: ids of parameters that stay in fp32; they are left out too.
        cuts: trained parameters that an axis beside data has changed: modules are as large as with all of these.

    Returns:
        units in order of registration, none for what no module has to itself.
    """
    modules = _modules_with_params(model, cuts)
    units = [_only(whole, lambda p: _may_be_cut(p) and id(p) not in kept) for whole in modules]
    return [unit for unit in units if unit.params]


def _check_cut_are_trained(model: nn.Module, cuts: Cuts) -> None:
    problems: list[Problem] = []
    for name, param in model.named_parameters() if cuts else ():
        placement = placement_of(param, cuts)
        if placement.cut_over and not is_trained(param):
            state = "in no optimizer group" if param.requires_grad else "frozen"
            hint = (
                "frozen layers (as under LoRA) cannot be cut yet: train them, in a group with lr 0 if they are to "
                "stay as they are; or leave them whole"
            )
            problems.append(Problem(f"model: {are_cut([name], placement)}, and {state}", hint))
    if problems:
        raise ModelError.of(problems)


def _may_be_cut(param: nn.Parameter) -> bool:
    has_values = param.is_floating_point() and param.numel() > 0
    return not is_trained(param) and has_values and is_ordinary(param)


def _only(unit: UnitSpec, wanted: Callable[[nn.Parameter], bool]) -> UnitSpec:
    return replace(unit, params=tuple((name, param) for name, param in unit.params if wanted(param)))


def _lightened(unit: UnitSpec, light: Collection[int], comm_dtype: torch.dtype | None) -> UnitSpec:
    """Returns the unit with only those of its parameters that may travel in `comm_dtype`; itself where none may."""
    params = tuple(item for item in unit.params if id(item[1]) in light)
    return replace(unit, params=params, comm_dtype=comm_dtype) if params else unit


def _placed_alike(unit: UnitSpec, cuts: Cuts) -> UnitSpec:
    """Returns the unit with only those of its parameters that lie on the ranks as most of its elements do.

    Those that several parts of a pipeline use are left out: elsewhere they are in other modules.
    """
    numels: dict[RankPlacement, int] = {}
    for _, param in unit.params:
        placement = placement_of(param, cuts)
        if is_shared(param, cuts):
            continue
        numels[placement] = numels.get(placement, 0) + whole_numel(param, cuts)
    params = tuple(item for item in unit.params if not is_shared(item[1], cuts))
    if numels.keys() <= {EVERYWHERE}:
        return replace(unit, params=params)
    most = max(numels, key=lambda placement: numels[placement])
    params = tuple(item for item in unit.params if placement_of(item[1], cuts) == most)
    return replace(unit, params=params, placement=most)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A module that may become a unit, with those that have the very same parameters."""

    name: str
    module: nn.Module
    twins: tuple[nn.Module, ...] = ()


def _modules_with_params(model: nn.Module, cuts: Cuts) -> Iterator[UnitSpec]:
    """Yields the modules that may become units, each with the parameters that it alone has."""
    names = {id(param): name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}
    candidates = _joined(_with_shared_parts_apart(list(_candidates(model, cuts)), cuts))
    homes = _homes(candidates)
    used_elsewhere = _used_outside(model, [module for unit in candidates for module in (unit.module, *unit.twins)])
    for unit in candidates:
        own = [p for p in unit.module.parameters() if len(homes[id(p)]) == 1 and id(p) not in used_elsewhere]
        yield UnitSpec(unit.name, unit.module, tuple((names[id(param)], param) for param in own), twins=unit.twins)


def _candidates(module: nn.Module, cuts: Cuts, *, prefix: str = "", in_block: bool = False) -> Iterator[_Candidate]:
    """Yields what inside `module` may become a unit; none contains another.

    Args:
        module: module to search for units.
        cuts: parameters that an axis beside data has changed.
        prefix: prefix of the names in `module`.
        in_block: whether `module` is a block that is itself searched; its parts are called in the way that blocks are.
    """
    if is_leaf(module):
        return
    blocks = {name for name, _ in blocks_of(module)}
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        is_part = in_block and not is_container and any(True for _ in child.children())
        if child_name in blocks or is_part or (is_leaf(child) and not is_container):
            yield _Candidate(name, child)
        elif isinstance(child, nn.Embedding | nn.Linear | nn.MultiheadAttention):
            if sum(whole_numel(param, cuts) for param in child.parameters()) >= SMALL_NUMEL:
                yield _Candidate(name, child)
        else:
            yield from _candidates(child, cuts, prefix=f"{name}.")


def _with_shared_parts_apart(candidates: list[_Candidate], cuts: Cuts) -> list[_Candidate]:
    """Replaces blocks that share a part by their parts."""
    homes = _homes(candidates)
    found: list[_Candidate] = []
    for unit in candidates:
        shared = {id(param) for param in unit.module.parameters() if len(homes[id(param)]) > 1}
        parts = [part for part in unit.module.children() if any(True for _ in part.children())]
        apart = shared and any(_ids(part) and _ids(part) <= shared for part in parts)
        if apart and not is_leaf(unit.module) and not _ids(unit.module) <= shared:
            found += _candidates(unit.module, cuts, prefix=f"{unit.name}.", in_block=True)
        else:
            found.append(unit)
    return found


def _joined(candidates: list[_Candidate]) -> list[_Candidate]:
    """Returns one candidate for a module with parts, or for its very parameters, that stands at several places.

    Layers are left alone: a head that is tied to its embedding is needed from the first moment to the last.
    """
    by_params: dict[object, list[_Candidate]] = {}
    for position, unit in enumerate(candidates):
        params = _ids(unit.module) if any(True for _ in unit.module.children()) else frozenset[int]()
        by_params.setdefault(params or position, []).append(unit)
    found: list[_Candidate] = []
    for first, *others in by_params.values():
        modules = {id(unit.module): unit.module for unit in others if unit.module is not first.module}
        found.append(replace(first, twins=tuple(modules.values())))
    return found


def _homes(candidates: list[_Candidate]) -> dict[int, set[int]]:
    """Returns for each parameter, by its id, the positions of the candidates that have it."""
    homes: dict[int, set[int]] = {}
    for position, unit in enumerate(candidates):
        for param in unit.module.parameters():
            homes.setdefault(id(param), set()).add(position)
    return homes


def _ids(module: nn.Module) -> frozenset[int]:
    return frozenset(id(param) for param in module.parameters())


def _used_outside(model: nn.Module, units: list[nn.Module]) -> set[int]:
    """Ids of parameters that a module outside of every unit holds as well."""
    inside = {id(module) for unit in units for module in unit.modules()}
    return {
        id(param)
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    }
