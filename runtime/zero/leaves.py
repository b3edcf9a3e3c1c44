"""Modules of which ranks may use other parts: said by the script or the config, gathered as one.

What a unit is, is decided in `units.py`, which asks here.

[Note: leaf modules]
At stage 3 every rank enters the gathers of every other, in one order. A layer that picks experts by its data, or a
model that skips blocks by chance, calls other units on other ranks. Where such a choice is made *inside* a block there
is nothing to say: a block is one unit, gathered whole, and what it does not use gets a gradient of zero. A choice made
outside of blocks has to be inside a *leaf module*, which is one unit too, whatever it contains. A ModuleList, which
nobody calls, can be a leaf as well: its parameters then stay gathered for the whole forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from dsrun.errors import ModelError

_LEAF = "_dsrun_leaf"


def is_leaf(module: nn.Module) -> bool:
    """Whether the parameters in `module` are gathered as one."""
    return _LEAF in module.__dict__


def set_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Gathers modules of these classes as one each, see [Note: leaf modules]; before `dsrun.initialize`.

    Args:
        model: the model.
        leaf_module_classes: classes or their names; as in DeepSpeed's function of this name.
        raise_if_not_found: an empty result is an error.

    Returns:
        the modules found.

    Raises:
        ModelError: none was found.
    """
    return _mark(_of_classes(model, leaf_module_classes, raise_if_not_found, "set_leaf_modules"))


def set_leaf_modules_by_name(
    model: nn.Module, module_names: Collection[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Does so for modules by their qualified names; see `set_leaf_modules`."""
    return _mark(_named(model, module_names, raise_if_not_found, "set_leaf_modules_by_name"))


def set_leaf_modules_by_suffix(
    model: nn.Module, name_suffixes: Collection[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Does so for modules by endings of their qualified names; see `set_leaf_modules`."""
    return _mark(_ending(model, name_suffixes, raise_if_not_found, "set_leaf_modules_by_suffix"))


def unset_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undoes `set_leaf_modules`; returns the modules found."""
    return _unmark(_of_classes(model, leaf_module_classes, raise_if_not_found, "unset_leaf_modules"))


def unset_leaf_modules_by_name(
    model: nn.Module, module_names: Collection[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undoes `set_leaf_modules_by_name`; returns the modules found."""
    return _unmark(_named(model, module_names, raise_if_not_found, "unset_leaf_modules_by_name"))


def unset_leaf_modules_by_suffix(
    model: nn.Module, name_suffixes: Collection[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undoes `set_leaf_modules_by_suffix`; returns the modules found."""
    return _unmark(_ending(model, name_suffixes, raise_if_not_found, "unset_leaf_modules_by_suffix"))


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model` that are gathered as one each."""
    return [module for module in model.modules() if is_leaf(module)]


def mark_leaves(
    model: nn.Module, *, classes: Collection[str], names: Collection[str], name_suffixes: Collection[str]
) -> list[nn.Module]:
    """Marks the leaf modules that a config names; what this model does not have is left out.

    Args:
        model: the model.
        classes: class names, with or without their module's.
        names: qualified names of modules.
        name_suffixes: endings of qualified names.
    """
    return _mark(
        [
            module
            for name, module in model.named_modules()
            if name in names
            or (name and name.endswith(tuple(name_suffixes)))
            or not _class_names(module).isdisjoint(classes)
        ]
    )


def _of_classes(
    model: nn.Module, entries: Sequence[type[nn.Module] | str], raise_if_not_found: bool, who: str
) -> list[nn.Module]:
    classes = {entry for entry in entries if isinstance(entry, type)}
    names = [entry for entry in entries if isinstance(entry, str)]
    found = [module for module in model.modules() if type(module) in classes or _class_names(module) & set(names)]
    if not found and raise_if_not_found:
        wanted = ", ".join([*sorted(entry.__name__ for entry in classes), *names])
        raise ModelError(
            f"{who}: {type(model).__name__} has no module of class {wanted}",
            hint=f"its classes are {', '.join(sorted({type(m).__name__ for m in model.modules()}))}",
        )
    return found


def _named(model: nn.Module, names: Collection[str], raise_if_not_found: bool, who: str) -> list[nn.Module]:
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing and raise_if_not_found:
        raise ModelError(
            f"{who}: {type(model).__name__} has no module `{'`, `'.join(missing)}`",
            hint="names are those of model.named_modules()",
        )
    return [modules[name] for name in names if name in modules]


def _ending(model: nn.Module, suffixes: Collection[str], raise_if_not_found: bool, who: str) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if name and name.endswith(tuple(suffixes))]
    if not found and raise_if_not_found:
        raise ModelError(
            f"{who}: no module's name in {type(model).__name__} ends in {', '.join(suffixes)}",
            hint="names are those of model.named_modules()",
        )
    return found


def _class_names(module: nn.Module) -> set[str]:
    kind = type(module)
    return {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}


def _mark(modules: list[nn.Module]) -> list[nn.Module]:
    for module in modules:
        module.__dict__[_LEAF] = True
    return modules


def _unmark(modules: list[nn.Module]) -> list[nn.Module]:
    for module in modules:
        module.__dict__.pop(_LEAF, None)
    return modules
