"""Floating-point inputs of a forward, in another dtype. Parameters are cast nowhere here."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with its floating-point tensors in `dtype`, inside of lists, tuples and dicts too.

    Other tensors and values are returned as they are, and so are containers that are made of other classes.

    Args:
        value: an argument of a forward.
        dtype: a floating-point dtype.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    kind: Any = cast(Any, type(value))
    if kind is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(cast_floating(item, dtype) for item in value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        items = cast("tuple[Any, ...]", value)
        return kind(*(cast_floating(item, dtype) for item in items))
    return value
