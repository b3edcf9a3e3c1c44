"""What an item of a script's data means: arguments of the model's forward, labels, and the loss. Draws nothing.

[Note: items]
Without a function for the loss, an item is what the model is called with: a dict gives keyword arguments, a tuple or
list positional ones, anything else is the only argument. The model then returns its loss: a scalar, an output with
`loss`, or a tuple whose first item is the loss. That is how Hugging Face's models and their data collators go together.

With a function for the loss, an item is a pair (inputs, labels): `inputs` is what the model is called with, as above,
and the loss is the function of its output and `labels`. A PipelineModule gets `inputs` as one argument, as DeepSpeed's
does, whatever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from dsrun.errors import ModelError

#: Values of a tensor that tell it from others.
_DIGEST_NUMEL = 1 << 16
#: (output of the model, labels) to a scalar.
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro batch of a rank; see [Note: items].

    Attributes:
        args: positional arguments of the model's forward.
        kwargs: its keyword arguments.
        labels: argument of the loss function beside the model's output; None where there is no such function.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    labels: Any = None


def read_item(item: Any, *, has_loss: bool, as_one: bool, device: torch.device, where: str) -> MicroBatch:
    """Returns what an item of the data means, with its tensors on a device; see [Note: items].

    Args:
        item: item of the script's data.
        has_loss: whether a function computes the loss.
        as_one: whether inputs are one argument, whatever they are.
        device: device of the model.
        where: name of the call that has drawn the item, for errors.

    Raises:
        ModelError: there is a function for the loss, and the item is no pair.
    """
    item = to_device(item, device)
    labels = None
    if has_loss:
        if not isinstance(item, (tuple, list)) or len(cast("list[Any]", item)) != 2:
            raise ModelError(
                f"{where}: an item of the data is a {_kind(item)}; expected a pair (inputs, labels), for there is a "
                "loss function",
                hint="have the loader give pairs, or let the model return its loss and leave the loss function out",
            )
        item, labels = cast("list[Any]", item)
    if as_one:
        return MicroBatch((item,), {}, labels)
    if isinstance(item, Mapping):
        return MicroBatch((), cast("Mapping[str, Any]", item), labels)
    if isinstance(item, (tuple, list)):
        return MicroBatch(tuple(cast("list[Any]", item)), {}, labels)
    return MicroBatch((item,), {}, labels)


def loss_of(output: Any, labels: Any, loss_fn: LossFunction | None, *, where: str) -> Tensor:
    """Returns the loss of a micro batch.

    Args:
        output: output of the model.
        labels: labels of the micro batch.
        loss_fn: function that computes the loss; None: the model has returned it.
        where: name of the call, for errors.

    Raises:
        ModelError: there is no loss, or it is no scalar.
    """
    loss = loss_fn(output, labels) if loss_fn is not None else _found(output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {_kind(loss)}"
        source = "the loss function returns" if loss_fn is not None else f"the model returns a {_kind(output)}, with"
        raise ModelError(
            f"{where}: {source} {shown} as loss; expected one number",
            hint="give the model labels, so that it returns a loss; or pass loss_fn=, a function of output and labels",
        )
    return loss.reshape(())


def to_device(value: Any, device: torch.device) -> Any:
    """Returns `value` with its tensors on a device, inside of lists, tuples and mappings too."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    kind: Any = cast(Any, type(value))
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(to_device(item, device) for item in cast("tuple[Any, ...]", value)))
    if kind in (list, tuple):
        return kind(to_device(item, device) for item in value)
    return value


def digest_of(value: Any) -> int:
    """Returns 32 bits that tell items of data apart: structure, shapes, and values that lie on the CPU.

    Of a large tensor the first values count.
    """
    return crc32(repr(_facts(value)).encode())


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        seen = value.detach().reshape(-1)[:_DIGEST_NUMEL] if value.device.type == "cpu" else value.new_zeros(0)
        numbers = seen.double() if not seen.is_complex() else seen.abs().double()
        weights = torch.arange(1, numbers.numel() + 1, dtype=torch.float64, device=numbers.device)
        return tuple(value.shape), str(value.dtype), float(numbers.sum()), float(numbers @ weights)
    if isinstance(value, Mapping):
        return [(key, _facts(item)) for key, item in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, (tuple, list)):
        return [_facts(item) for item in cast("list[Any]", value)]
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


def _found(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return cast("Mapping[str, Any]", output).get("loss")
    if isinstance(output, (tuple, list)) and output:
        return cast("list[Any]", output)[0]
    return getattr(output, "loss", None)


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
