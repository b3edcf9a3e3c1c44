"""Which parameters an engine trains: those that ask for a gradient, but for those that are in no optimizer group.

torch trains on with such parameters: they get gradients, in `.grad` and on their own rank, and nobody updates them. So
they lie where frozen ones do. The mark is on the parameter, for who looks at it has no groups.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

_LEFT_OUT = "_dsrun_left_out"


def is_trained(param: nn.Parameter) -> bool:
    """Whether an engine updates the parameter."""
    return param.requires_grad and not hasattr(param, _LEFT_OUT)


def mark_left_out(model: nn.Module, grouped: Collection[int]) -> list[str]:
    """Marks what asks for a gradient and is in no optimizer group, and takes the marks off all others.

    Args:
        model: the model.
        grouped: ids of the parameters that are in a group.

    Returns:
        the names of those that are marked.
    """
    names: list[str] = []
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in grouped:
            setattr(param, _LEFT_OUT, True)
            names.append(name)
        elif hasattr(param, _LEFT_OUT):
            delattr(param, _LEFT_OUT)
    return names
