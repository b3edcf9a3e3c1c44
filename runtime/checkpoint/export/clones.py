"""State as copies that `torch.save` can write without the buffers behind it. For scripts; dsrun's own files need none.

torch.save writes the whole storage of a tensor, and a parameter of an engine is a view of its unit's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Returns the same structure with each tensor a copy of its own; whatever else is in it is as it was.

    Args:
        item: tensor, or lists, tuples and mappings of them, nested in any way.
        device: device of the copies.
    """
    if isinstance(item, Tensor):
        found = item.detach()
        copy = found.to(device)
        return copy.clone() if copy.data_ptr() == found.data_ptr() else copy
    if isinstance(item, Mapping):
        kind: Any = type(item)
        return kind({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        named: Any = type(item)
        return named(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
