"""How many tokens a batch has: by shapes, by an attention mask, and by labels. Reads nothing from a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

#: Label that losses pass over, as in `torch.nn.functional.cross_entropy`.
IGNORED_LABEL = -100


def count_tokens(args: Iterable[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns samples x sequence length of the first tensor among a forward's arguments; 0 where it holds no tokens.

    Tokens are whole numbers in two dimensions. An image, a table of real numbers or a batch of labels is none, and a
    model that takes whole numbers of another meaning in two dimensions is counted wrongly.
    """
    first = _first_tensor(args)
    if first is None:
        first = _first_tensor(kwargs.values())
    return first.numel() if first is not None and _holds_tokens(first) else 0


def named_input(name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns an input of a forward by its name, also from a batch that is given as one object; None where it is not.

    Args:
        name: name of the input.
        args: arguments of a forward.
        kwargs: its keyword arguments.
    """
    found = kwargs.get(name)
    for each in args:
        if found is None and isinstance(each, Mapping):
            found = cast("Mapping[Any, Any]", each).get(name)
    return found


def count_unpadded(args: Iterable[Any], kwargs: Mapping[str, Any], padded: int) -> Tensor | int:
    """Returns the tokens that an attention mask lets through; all of them where there is no mask of that form.

    Args:
        args: arguments of a forward.
        kwargs: its keyword arguments.
        padded: number of its tokens, see `count_tokens`.
    """
    mask = named_input("attention_mask", args, kwargs)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.numel() != padded or mask.dtype.is_floating_point:
        return padded
    return mask.count_nonzero()


def count_labels(labels: Any) -> tuple[int, Tensor] | None:
    """Returns the number of labels, and of those that count in the loss; None where they are no labels of tokens.

    Args:
        labels: labels that a loss compares the output with, of any form.
    """
    if not isinstance(labels, Tensor) or not _holds_tokens(labels):
        return None
    # On processors a third of what counting a comparison takes.
    return labels.numel(), (labels - IGNORED_LABEL).count_nonzero()


def _holds_tokens(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32)


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, Mapping):
            found = _first_tensor(cast("Mapping[Any, Any]", value).values())
            if found is not None:
                return found
    return None
