"""Which weights a loss has read where nobody had gathered them, by its graph; what follows, the engine decides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...zero.units.unit import ParamUnit

#: How nodes of reads that got a gathered copy are called, see [Note: reads outside] in zero/hooks/outside.py.
_GATHERED_READ = "_HandedOut"


def never_gathered_reads(loss: Tensor, unused: Iterable[ParamUnit]) -> list[str]:
    """Returns the names of parameters that the loss depends on though the forward of their unit has never run.

    Parameters of other units are not told: their own forward has read them too. Walks the whole graph.

    Args:
        loss: loss tensor with an autograd graph.
        unused: the units whose forward has not run.
    """
    names = {
        id(param): extent.name
        for unit in unused
        for param, extent in zip(unit.params, unit.layout.extents, strict=True)
    }
    found: dict[str, None] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and names:
        node = waiting.pop()
        is_gathered = type(node).__name__.startswith(_GATHERED_READ)
        for following, _ in node.next_functions:
            name = names.get(id(getattr(following, "variable", None)))  # a leaf's node has its tensor
            if name is not None and not is_gathered:
                found[name] = None
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found)
