"""Values of an optimizer's options: numbers of Python's, or tensors of one number, which keep their identity.

A script gives a tensor for a learning rate so that captured or compiled steps read what it holds now
(`lr=torch.tensor(1e-3)`, `capturable=True`). So whoever sets an option writes into the tensor that is there.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    """Sets an option of a group: in the tensors that are its value now, if they are tensors, also in a tuple.

    Args:
        group: parameter group of an optimizer.
        name: name of the option.
        value: the new value, a number or a tuple of numbers where tensors are to be written.
    """
    group[name] = _written(group.get(name), value)


def plain_option(value: Any) -> Any:
    """Returns an option, or a schedule's state, with numbers of Python's for its tensors of one number, exactly.

    Reads from their devices. Looks into tuples, lists and dicts.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if type(value) in (tuple, list):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return type(items)(plain_option(item) for item in items)
    if type(value) is dict:
        return {key: plain_option(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def kept_option(value: Any) -> Any:
    """Returns an option as it is now, for who reads it later: tensors are copied, to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        return tuple(kept_option(item) for item in items) if any(isinstance(item, Tensor) for item in items) else value
    return value


def _written(now: Any, value: Any) -> Any:
    """Returns `value`, or what is there now with the value written into it."""
    if isinstance(now, Tensor) and now.numel() == 1 and value is not now:
        now.detach().fill_(value)
        return now
    if isinstance(now, tuple) and isinstance(value, tuple):
        present, new = cast("tuple[Any, ...]", now), cast("tuple[Any, ...]", value)
        if len(present) == len(new) and any(isinstance(item, Tensor) for item in present):
            return tuple(_written(*pair) for pair in zip(present, new, strict=True))
    return value
