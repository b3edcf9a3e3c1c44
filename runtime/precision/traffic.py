"""Whose gradients may travel between ranks in the format of autocast. How they travel is the reducer's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dsrun.errors import ModelError

_KEY = "torch_autocast.lower_precision_safe_modules"


def low_precision_gradients(model: nn.Module, classes: Sequence[str], *, compute: torch.dtype) -> frozenset[int]:
    """Returns the ids of parameters that modules of given classes have themselves; of a 16-bit model, none.

    Args:
        model: the model.
        classes: names of classes, with or without their package: `Linear`, `torch.nn.Linear`. Subclasses are other
            classes, as in DeepSpeed.
        compute: dtype of the parameters, which their gradients have too.

    Raises:
        ModelError: no module of the model is of one of the classes.
    """
    found: set[int] = set()
    for name in classes:
        modules = [module for module in model.modules() if _is_called(type(module), name)]
        if not modules:
            owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
            kinds = sorted({type(module).__name__ for module in owners})
            raise ModelError(
                f"`{_KEY}` has {name!r}, and no module of the model is of that class",
                hint=f"modules with parameters are of {', '.join(kinds)}" if kinds else "the model has no parameters",
            )
        found.update(id(param) for module in modules for param in module.parameters(recurse=False))
    return frozenset(found) if compute == torch.float32 else frozenset()


def _is_called(kind: type[nn.Module], name: str) -> bool:
    """Whether a class has a name: `torch.nn.Linear` is defined in `torch.nn.modules.linear`."""
    package, _, last = name.rpartition(".")
    return kind.__name__ == last and (not package or f"{kind.__module__}.".startswith(f"{package}."))
