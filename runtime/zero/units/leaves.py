"""Modules of which ranks may use other parts: said by the script or the config, gathered as one.

What a unit is, is decided in `find.py`, which asks here.

[Note: leaf modules]
At stage 3 every rank enters the gathers of every other, in one order. A layer that picks experts by its data, or a
model that skips blocks by chance, calls other units on other ranks. Where such a choice is made *inside* a block there
is nothing to say: a block is one unit, gathered whole, and what it does not use gets a gradient of zero. A choice made
outside of blocks has to be inside a *leaf module*, which is one unit too, whatever it contains. A ModuleList, which
nobody calls, can be a leaf as well: its parameters then stay gathered for the whole forward and backward.

The mark is the attribute that DeepSpeed uses, which some models set themselves; names, arguments, results and errors
are those of deepspeed.utils.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import nn

from dsrun.errors import ModelError

from ...compat import forward_pre_hooks
from ...own_hooks import OwnHook
from ..partition_parameters import is_zero_param

_LEAF = "_z3_leaf"


class LeafNotFoundError(ModelError):
    """No module of the model is what was asked for."""


def is_leaf(model: nn.Module) -> bool:
    """Whether the parameters in a module are gathered as one."""
    return bool(getattr(model, _LEAF, False))


def set_leaf_module(model: nn.Module, flag: bool) -> None:
    """Says of one module whether it is gathered as one, see [Note: leaf modules]; before `dsrun.initialize`.

    Args:
        model: the module.
        flag: whether it is.

    Raises:
        ModelError: an engine has cut the module already.
    """
    _mark([model], flag, "set_z3_leaf_module")


def set_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Gathers modules of these classes as one each, see [Note: leaf modules]; before `dsrun.initialize`.

    Args:
        model: the model.
        leaf_module_classes: classes, of which subclasses count too, or names of classes.
        raise_if_not_found: an empty result is an error.

    Returns:
        the modules found.

    Raises:
        ModelError: none was found, or an engine has cut them already.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found, "set_z3_leaf_modules")


def set_leaf_modules_by_name(
    model: nn.Module, module_names: Collection[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Does so for modules by their qualified names; see `set_leaf_modules`.

    Args:
        model: the model.
        module_names: qualified names of the modules, as in `model.named_modules()`.
        flag: False: they are not gathered as one.
        raise_if_not_found: a name that is missing is an error.

    Returns:
        the modules found, and the names that are missing.

    Raises:
        ModelError: a name is missing, or an engine has cut the modules already.
    """
    return _mark_named(model, module_names, flag, raise_if_not_found, "set_z3_leaf_modules_by_name")


def set_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Collection[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Does so for modules by endings of their qualified names; see `set_leaf_modules_by_name`.

    Args:
        model: the model.
        module_name_suffixes: endings.
        flag: False: they are not gathered as one.
        raise_if_not_found: an ending that no name has is an error.

    Returns:
        the modules found, and the endings that no name has.

    Raises:
        ModelError: an ending is missing, or an engine has cut the modules already.
    """
    return _mark_ending(model, module_name_suffixes, flag, raise_if_not_found, "set_z3_leaf_modules_by_suffix")


def unset_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undoes `set_leaf_modules`; returns the modules found."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found, "unset_z3_leaf_modules")


def unset_leaf_modules_by_name(
    model: nn.Module, module_names: Collection[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Undoes `set_leaf_modules_by_name`; returns what that does."""
    return _mark_named(model, module_names, False, raise_if_not_found, "unset_z3_leaf_modules_by_name")


def unset_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Collection[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Undoes `set_leaf_modules_by_suffix`; returns what that does."""
    return _mark_ending(model, module_name_suffixes, False, raise_if_not_found, "unset_z3_leaf_modules_by_suffix")


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model` that are gathered as one each."""
    return [module for module in model.modules() if is_leaf(module)]


def mark_leaves(
    model: nn.Module,
    *,
    classes: Collection[str],
    names: Collection[str],
    name_suffixes: Collection[str],
    say: Callable[[str], object],
) -> None:
    """Marks the leaf modules that a config names, and says what of them this model does not have.

    Args:
        model: the model.
        classes: class names, with or without their module's.
        names: qualified names of modules.
        name_suffixes: endings of qualified names.
        say: callback that gets a line of text on what was not found.
    """
    where = "zero_optimization.leaf_module"
    missing = [name for name in classes if not _mark_classes(model, [name], True, False, where)]
    missing += _mark_named(model, names, True, False, where)[1]
    missing += _mark_ending(model, name_suffixes, True, False, where)[1]
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing)
        say(f"dsrun: `{where}` names {shown}, which {type(model).__name__} does not have")


def _mark_classes(
    model: nn.Module, entries: Sequence[type[nn.Module] | str], flag: bool, raise_if_not_found: bool, who: str
) -> list[nn.Module]:
    classes = tuple(entry for entry in entries if isinstance(entry, type))
    names = [entry for entry in entries if isinstance(entry, str)]
    found = [
        module
        for module in model.modules()
        if isinstance(module, classes) or not _class_names(module).isdisjoint(names)
    ]
    if not found and raise_if_not_found:
        wanted = ", ".join([*sorted(entry.__name__ for entry in classes), *names])
        raise LeafNotFoundError(
            f"{who}: {type(model).__name__} has no module of class {wanted}",
            hint=f"its classes are {', '.join(sorted({type(m).__name__ for m in model.modules()}))}",
        )
    return _mark(found, flag, who)


def _mark_named(
    model: nn.Module, names: Collection[str], flag: bool, raise_if_not_found: bool, who: str
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing and raise_if_not_found:
        raise LeafNotFoundError(
            f"{who}: {type(model).__name__} has no module `{'`, `'.join(missing)}`",
            hint="names are those of model.named_modules()",
        )
    return _mark([modules[name] for name in names if name in modules], flag, who), missing


def _mark_ending(
    model: nn.Module, suffixes: Collection[str], flag: bool, raise_if_not_found: bool, who: str
) -> tuple[list[nn.Module], list[str]]:
    found: dict[str, nn.Module] = {}
    missing: list[str] = []
    for suffix in suffixes:
        ending = {name: module for name, module in model.named_modules() if name.endswith(suffix)}
        found |= ending
        if not ending:
            missing.append(suffix)
    if missing and raise_if_not_found:
        raise LeafNotFoundError(
            f"{who}: no module's name in {type(model).__name__} ends in {', '.join(missing)}",
            hint="names are those of model.named_modules()",
        )
    return _mark(list(found.values()), flag, who), missing


def _class_names(module: nn.Module) -> set[str]:
    kind = type(module)
    return {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}


def _mark(modules: list[nn.Module], flag: bool, who: str) -> list[nn.Module]:
    for module in modules:
        if is_leaf(module) is not flag and _is_cut(module):
            raise ModelError(
                f"{who}: an engine has cut {type(module).__name__} into units already, so the mark would do nothing",
                hint="mark leaf modules before dsrun.initialize",
            )
        setattr(module, _LEAF, flag)
    return modules


def _is_cut(module: nn.Module) -> bool:
    """Whether an engine gathers the module's parameters now, in units that it has chosen."""
    hooks = (hook for inner in module.modules() for hook in forward_pre_hooks(inner))
    return any(map(is_zero_param, module.parameters())) and any(isinstance(hook, OwnHook) for hook in hooks)
