"""Which parts of a model are compared, cut against whole: every module whose plan could be wrong lies in one of them.

[Note: regions]
Some modules are right by themselves: a column that gathers its outputs takes and gives what is whole. Others rest on
those around them: a column gives parts, and something behind it has to take parts. So what is compared, a region, holds
columns and the rows behind them. A block of a stack is one; inside of it the smallest modules with a column and a row
are, for models that never call the block itself. Outside of blocks the smallest such modules are regions too.

Blocks that are alike (class, shapes, plan, plain attributes and functions of all their modules) are of one kind, and
the first of a kind that is called stands for all. A number of the block does not count: what a forward decides by it
(`layer_idx % 2`) is not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from dsrun.errors import ModelError, Problem

from ....stacks import find_stacks
from ...twins import twin_of
from ..styles import Form, ModelPlan, Style

#: Forms of modules that take what is whole and give what is whole, each by itself.
_CLOSED = (Form.WHOLE, Form.VOCABULARY)
#: Forms that give parts, and those that take parts.
_GIVING, _TAKING = (Form.COLUMN, Form.HIDDEN), (Form.ROW, Form.SUMMED_OUTPUT)


@dataclass(slots=True)
class Kind:
    """Parts of a model that are alike, before it is cut.

    Attributes:
        names: qualified names of all.
        wholes: twins of all.
        open: names of the modules in each whose plan is compared, by their names in it; empty for itself.
        inner: parts of these that are compared where they cannot be, or are never called.
    """

    names: list[str]
    wholes: list[nn.Module]
    open: list[str]
    inner: list[Kind]

    @property
    def alone(self) -> list[str]:
        """Those of the open modules that are in no inner kind."""
        first = self.names[0]
        inner = [name_inside(one.names[0], first) for one in self.inner]
        return [name for name in self.open if not any(is_inside(name, part) for part in inner)]


def kinds_of_regions(model: nn.Module, plan: ModelPlan, *, apart: Sequence[str] = ()) -> list[Kind]:
    """Returns what is to be compared, in order of the first ones; see [Note: regions].

    Args:
        model: model with whole parameters.
        plan: styles of its modules.
        apart: modules whose parts go to what knows of them: an output layer with a loss of parts of the logits.

    Raises:
        ModelError: naming the modules outside of blocks that give or take parts, and that nothing can be compared with.
    """
    unchecked = [name for name in _open_modules(plan) if name not in apart]
    kinds: dict[object, Kind] = {}
    stacks = find_stacks(model, skip=lambda _: False)
    numbering = {stack.name: _numbering_of([block for _, block in stack.blocks]) for stack in stacks}
    blocks = [(stack.name, name, block) for stack in stacks for name, block in stack.blocks]
    for stack, name, block in blocks:
        own = [name_inside(one, name) for one in unchecked if is_inside(one, name)]
        if not own:
            continue
        signature = (_signature(block, numbering[stack]), _plan_inside(plan, name))
        if signature in kinds:
            kinds[signature].names.append(name)
            kinds[signature].wholes.append(twin_of(block, with_tensors=True))
        else:
            kinds[signature] = Kind([name], [twin_of(block, with_tensors=True)], own, [])
    for kind in kinds.values():
        parts = _smallest(kind.open, plan, around=kind.names[0])
        kind.inner = [_inner_kind(kind, part) for part in parts]
    held = [name for _, name, _ in blocks]
    outside = [one for one in unchecked if not any(is_inside(one, name) for name in held)]
    return [*kinds.values(), *_outside_of_blocks(model, plan, outside, held)]


def _outside_of_blocks(
    model: nn.Module, plan: ModelPlan, names: Sequence[str], blocks: Sequence[str]
) -> Iterator[Kind]:
    """Yields the regions of modules that are in no block."""
    found = _smallest(names, plan, around="")
    problems: list[Problem] = []
    for name in names:
        around = next((part for part in found if is_inside(name, part)), None)
        stands = f"model: `{name}` ({type(model.get_submodule(name)).__name__})"
        by = f"(plan of {plan.source})"
        if around is None:
            problems.append(Problem(f"{stands} works on parts, and no column or row goes with it {by}", _HINT))
        elif any(is_inside(block, around) for block in blocks):
            problems.append(
                Problem(f"{stands} is outside of the repeated blocks that its column or row lies behind {by}", _HINT)
            )
    if problems:
        raise ModelError.of(problems)
    for part in found:
        own = [name_inside(name, part) for name in names if is_inside(name, part)]
        module = model.get_submodule(part) if part else model
        yield Kind([part], [twin_of(module, with_tensors=True)], own, [])


_HINT = (
    "say how its layers are cut in `tensor_parallel.partition_config`; "
    '`"check": false` believes the plan as it is, and compares nothing'
)


def _open_modules(plan: ModelPlan) -> list[str]:
    """Returns the names of modules that are not right by themselves, in the plan's order."""
    found = [name for name, style in plan.modules.items() if not _is_closed(style)]
    found += [name.rpartition(".")[0] for name, style in plan.parameters.items() if style.form is not Form.WHOLE]
    return list(dict.fromkeys(found))


def _is_closed(style: Style) -> bool:
    return style.form in _CLOSED or style.gathers_output or style.splits_input


def _smallest(names: Sequence[str], plan: ModelPlan, *, around: str) -> list[str]:
    """Returns the smallest modules with something that gives parts and something that takes them, none in another.

    Args:
        names: names of modules, in that of `around`.
        plan: styles of all.
        around: name of the block that holds them, which is none of these; empty for the model, which may be.
    """
    full = {name: f"{around}.{name}" if around and name else around or name for name in names}
    forms = {name: _forms_of(full[name], plan) for name in names}
    found: set[str] = set()
    for name in names:
        for part in _outwards(name):
            inside = set[Form]().union(*(forms[one] for one in names if is_inside(one, part)))
            if Form.EXPERTS in inside or (inside & set(_GIVING) and inside & set(_TAKING)):
                found.update([part] if part or not around else [])
                break
    return [part for part in sorted(found) if not any(is_inside(part, other) for other in found - {part})]


def _forms_of(name: str, plan: ModelPlan) -> set[Form]:
    own = {plan.modules[name].form} if name in plan.modules else set[Form]()
    return own | {style.form for key, style in plan.parameters.items() if key.rpartition(".")[0] == name}


def _inner_kind(kind: Kind, part: str) -> Kind:
    """Returns the same part of all modules of a kind."""
    own = [name_inside(name, part) for name in kind.open if is_inside(name, part)]
    wholes = [whole.get_submodule(part) for whole in kind.wholes]
    return Kind([f"{name}.{part}" for name in kind.names], wholes, own, [])


def _outwards(name: str) -> Iterator[str]:
    """Yields a name and those of the modules around it, innermost first; the last one is empty."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield name


def is_inside(name: str, around: str) -> bool:
    """Whether a module is another one, or in it."""
    return not around or name == around or name.startswith(f"{around}.")


def name_inside(name: str, around: str) -> str:
    """Returns the name that a module has in another one."""
    return name.removeprefix(around).removeprefix(".")


def _plan_inside(plan: ModelPlan, block: str) -> object:
    """Returns what a plan says of a block, for comparison with others."""
    said: tuple[Mapping[str, Any], ...] = (plan.modules, plan.parameters, plan.attributes)
    return tuple(
        frozenset((name_inside(name, block), style) for name, style in one.items() if is_inside(name, block))
        for one in said
    )


def _signature(block: nn.Module, numbering: Collection[tuple[str, str]]) -> object:
    """Returns what makes two blocks do the same: classes, shapes, and plain attributes and functions of all modules.

    Args:
        block: the block.
        numbering: attributes that number the blocks, which are left out.
    """
    return tuple(
        (
            name,
            type(part),
            tuple((key, tuple(value.shape)) for key, value in _own_tensors(part)),
            tuple(
                (key, _plain(value))
                for key, value in sorted(vars(part).items())
                if not key.startswith("_") and (name, key) not in numbering
            ),
        )
        for name, part in block.named_modules()
    )


def _own_tensors(part: nn.Module) -> list[tuple[str, Tensor]]:
    return [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]


def _plain(value: object) -> object:
    """Returns what counts of an attribute: a plain value, the code of a function, of all else the type."""
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in cast("list[object]", value))
    return type(value), getattr(value, "__code__", None)


def _numbering_of(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Returns the attributes that number the blocks of a stack: whole numbers that go up by one, by module and name."""
    found: dict[tuple[str, str], list[int]] = {}
    for block in blocks:
        for name, part in block.named_modules():
            for key, value in vars(part).items():
                if type(value) is int:
                    found.setdefault((name, key), []).append(value)
    return {
        place
        for place, values in found.items()
        if len(values) == len(blocks) and values == list(range(values[0], values[0] + len(values)))
    }
