"""What a block is: a part of a repeated stack. Knows the tree of modules only; its users decide what blocks are for.

[Note: blocks]
The items of a ModuleList or Sequential of two or more are blocks where they are of one class and have parts of their
own. Bare leaves (a list of Linears) are none, nor are lists of lists, which are looked into.

Items of several classes (attention here, a state space there) are blocks one by one: those that have parts of their own
and are no trifles. In a ModuleList all of these are, for that is what layers are kept in, except one that has most of
the list and consists of a stack for the most part: a whole model beside small things, which is looked into. A
Sequential of several classes is a pipeline as often as a stack of layers, so an item that has a stack of its own, or is
a Sequential itself, is looked into there.

Where a pipeline has cut a stack, an `AbsentBlock` stands for each block that another rank has. It counts as that block
when it is decided which items are blocks, so that all ranks decide alike, and is none itself. So it is counted by the
class that it had before an axis put one of its own before it, which not every block of a stack need get. For the same
reason sizes are those of whole parameters, of which ranks may have parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

#: Attribute of a class that stands before a module's own, with the latter: a module with one is as it was.
OWN_CLASS = "_dsrun_own_class"
#: Attribute of a parameter of which a rank has a part, with the elements of the whole.
_WHOLE_NUMEL = "_dsrun_whole_numel"
#: Modules with fewer parameters are not worth a treatment of their own, where nothing says that they are repeated.
SMALL_NUMEL = 4096


class AbsentBlock(nn.Module):
    """The place of a block that another rank has: no parameters, buffers or parts. Its forward is not to be called.

    Args:
        kind: class of the block.
        numel: number of the block's parameters.
        has_parts: whether the block has modules of its own.
        is_mostly_a_stack: whether most of the block's parameters are in a stack inside of it.
    """

    def __init__(self, kind: type[nn.Module], *, numel: int, has_parts: bool, is_mostly_a_stack: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.numel = numel
        self.has_parts = has_parts
        self.is_mostly_a_stack = is_mostly_a_stack

    @classmethod
    def of(cls, block: nn.Module) -> AbsentBlock:
        """Returns the place of a block, which may be on the meta device."""
        return cls(
            _kind(block),
            numel=numel_of(block),
            has_parts=_has_parts(block),
            is_mostly_a_stack=_is_mostly_a_stack(block),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: another rank has the block."""
        del args, kwargs
        raise AssertionError(f"the {self.kind.__name__} that was called is another rank's")


@dataclass(frozen=True, slots=True)
class Stack:
    """The blocks of one stack, in order.

    Attributes:
        name: qualified name of the module that holds the blocks.
        blocks: (qualified name, module).
    """

    name: str
    blocks: tuple[tuple[str, nn.Module], ...]


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the children of `module` that are blocks, by name; see [Note: blocks]."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return []
    children = list(module.named_children())
    if len({_kind(child) for _, child in children}) == 1:
        return _present(children) if _has_parts(children[0][1]) else []
    found = [(name, child) for name, child in children if _has_parts(child) and numel_of(child) >= SMALL_NUMEL]
    if isinstance(module, nn.Sequential):
        kept = [
            (name, child) for name, child in found if not (issubclass(_kind(child), nn.Sequential) or has_stack(child))
        ]
        return _present(kept)
    most = sum(numel_of(child) for _, child in children) // 2
    return _present(
        [(name, child) for name, child in found if numel_of(child) <= most or not _is_mostly_a_stack(child)]
    )


def has_stack(module: nn.Module) -> bool:
    """Whether there are blocks in `module`."""
    return any(blocks_of(part) for part in module.modules())


def _kind(module: nn.Module) -> type[nn.Module]:
    return module.kind if isinstance(module, AbsentBlock) else getattr(type(module), OWN_CLASS, type(module))


def _present(blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    return [(name, block) for name, block in blocks if not isinstance(block, AbsentBlock)]


def _is_mostly_a_stack(module: nn.Module) -> bool:
    if isinstance(module, AbsentBlock):
        return module.is_mostly_a_stack
    stacks = (nn.ModuleList(block for _, block in blocks_of(part)) for part in module.modules())
    return any(2 * numel_of(stack) > numel_of(module) for stack in stacks)


def numel_of(module: nn.Module) -> int:
    """Returns the elements of a module's whole parameters, each counted once; for an `AbsentBlock`, of its block."""
    if isinstance(module, AbsentBlock):
        return module.numel
    return sum(getattr(param, _WHOLE_NUMEL, param.numel()) for param in module.parameters())


def note_whole_numel(param: nn.Parameter, numel: int) -> None:
    """Writes down the elements of a whole parameter, of which this rank keeps a part: parts need not be equal."""
    setattr(param, _WHOLE_NUMEL, numel)


def is_part(param: nn.Parameter) -> bool:
    """Whether this rank keeps a part of a whole parameter, see `note_whole_numel`."""
    return hasattr(param, _WHOLE_NUMEL)


def find_stacks(module: nn.Module, *, skip: Callable[[nn.Module], bool], name: str = "") -> list[Stack]:
    """Returns the outermost stacks in `module`, in order of registration.

    Args:
        module: the model.
        skip: modules that are not looked into.
        name: qualified name of `module`; empty for the whole model.
    """
    if skip(module):
        return []
    prefix = f"{name}." if name else ""
    blocks = blocks_of(module)
    stacks = [Stack(name, tuple((f"{prefix}{child}", block) for child, block in blocks))] if blocks else []
    known = {id(block) for _, block in blocks}
    for child, part in module.named_children():
        if id(part) not in known:
            stacks += find_stacks(part, skip=skip, name=prefix + child)
    return stacks


def block_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Returns what the qualified names of modules and parameters in the blocks of a model begin with."""
    return tuple(f"{name}." for stack in find_stacks(model, skip=lambda _: False) for name, _ in stack.blocks)


def _has_parts(module: nn.Module) -> bool:
    if isinstance(module, AbsentBlock):
        return module.has_parts
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(True for _ in module.children())
