"""What a block is: a part of a repeated stack. Knows the tree of modules only; its users decide what blocks are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Stack:
    """The blocks of one stack, in order.

    Attributes:
        name: of the module that holds them.
        blocks: (qualified name, module).
    """

    name: str
    blocks: tuple[tuple[str, nn.Module], ...]


def is_stack(module: nn.Module) -> bool:
    """Whether `module` is a stack of blocks: a list of two or more modules of one class, with parts of their own."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    children = list(module.children())
    if len({type(child) for child in children}) > 1 or isinstance(children[0], nn.ModuleList | nn.ModuleDict):
        return False
    # A stack of bare leaves (say, a ModuleList of Linears) is no stack of blocks: its parts are units by themselves.
    return any(True for _ in children[0].children())


def find_stacks(module: nn.Module, *, skip: Callable[[nn.Module], bool], name: str = "") -> list[Stack]:
    """Returns the outermost stacks in `module`, in order of registration.

    Args:
        module: the model.
        skip: modules that are not looked into.
        name: of `module`.
    """
    if skip(module):
        return []
    prefix = f"{name}." if name else ""
    if is_stack(module):
        return [Stack(name, tuple((f"{prefix}{child}", block) for child, block in module.named_children()))]
    return [
        stack for child, part in module.named_children() for stack in find_stacks(part, skip=skip, name=prefix + child)
    ]
