"""The layers of a model as pieces, alike on every rank whatever part of the model it has. Cuts nothing.

A piece is a block of a stack, or an outermost module outside of stacks. What goes by pieces does not depend on where
the model is cut: the random numbers of a layer, and which small parameters share a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

from torch import nn

from ...stacks import AbsentBlock, find_stacks


def pieces_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the pieces of a model that this rank has, by their names in the whole model."""
    stacks = find_stacks(model, skip=lambda module: False)
    blocks = {id(block) for stack in stacks for _, block in stack.blocks}

    def look(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in blocks or not any(_is_in_stack(part, blocks) for part in module.modules()):
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from look(child, f"{name}.{child_name}")

    for name, child in model.named_children():
        if not isinstance(child, AbsentBlock):
            yield from look(child, name)


def number_of(name: str) -> int:
    """Returns the number of a piece, made of its name."""
    return crc32(name.encode())


def piece_names(model: nn.Module) -> dict[str, str]:
    """Returns the name of the piece that each parameter of a model is in, by the parameter's name.

    One that a module around the blocks has itself is a piece of its own.
    """
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    inside = {
        f"{name}.{param}": name
        for name, module in pieces_of(model)
        for param, _ in module.named_parameters(remove_duplicate=False)
    }
    return {name: name for name in names} | inside


def _is_in_stack(module: nn.Module, blocks: set[int]) -> bool:
    return id(module) in blocks or isinstance(module, AbsentBlock)
