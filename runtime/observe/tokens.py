"""How many tokens a batch has, as far as its tensors say it. Reads shapes, no values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def count_tokens(args: Iterable[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns samples x sequence length of the first tensor among a forward's arguments; 0 where it holds no tokens.

    Tokens are whole numbers in two dimensions. An image, a table of real numbers or a batch of labels is none, and a
    model that takes whole numbers of another meaning in two dimensions is counted wrongly.
    """
    for tensor in _tensors([*args, *kwargs.values()]):
        return tensor.numel() if tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32) else 0
    return 0


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
