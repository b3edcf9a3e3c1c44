"""What goes from one chunk to the next: nested values to tensors and a header, and back. Sends nothing.

A value is tensors and plain values in nested tuples, lists and dicts. Tensors that carry gradients arrive behind
leaves, at which the backward of the next chunk ends; gradients come back for these alone, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...precision.policy import DTYPES

_PLAIN = (bool, int, float, str, type(None))
#: Names that dtypes have in headers.
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Boundary:
    """A value between two chunks.

    Attributes:
        value: the value itself.
        carriers: leaves behind its tensors that carry gradients, in order.
    """

    value: Any
    carriers: tuple[Tensor, ...]


def pack(value: Any, *, dtype: torch.dtype | None, where: str) -> tuple[bytes, list[Tensor], tuple[Tensor, ...]]:
    """Takes a value apart for a message.

    Args:
        value: value that a chunk has returned.
        dtype: dtype that floating tensors travel in; None: their own.
        where: text that names the place in the model, for errors.

    Returns:
        (header, tensors to send, those tensors of the value that carry gradients).

    Raises:
        ModelError: the value holds something that is no tensor and no plain value.
    """
    tensors: list[Tensor] = []
    carriers: list[Tensor] = []

    def take(item: Any) -> Any:
        if isinstance(item, Tensor):
            carries = item.requires_grad  # only floating and complex tensors can
            if carries:
                carriers.append(item)
            sent = item.detach()
            given = None
            if dtype is not None and sent.is_floating_point() and sent.dtype != dtype:
                given, sent = _name(sent.dtype, where), sent.to(dtype)
            tensors.append(sent)
            return ["t", int(carries), given]
        if isinstance(item, _PLAIN):
            return ["v", item]
        if type(item) in (tuple, list):
            return ["l" if isinstance(item, list) else "u", [take(part) for part in item]]
        if type(item) is dict:
            pairs = cast("dict[Any, Any]", item)
            return ["d", [[take(key), take(part)] for key, part in pairs.items()]]
        raise ModelError(
            f"model: {where} hands a {type(item).__name__} on to the next pipeline stage; tensors and plain values in "
            "tuples, lists and dicts can be sent",
            hint="return tensors from the layers that stages are cut between",
        )

    header = json.dumps(take(value), separators=(",", ":")).encode()
    return header, tensors, tuple(carriers)


def unpack(header: bytes, tensors: Sequence[Tensor]) -> Boundary:
    """Puts a message together again; the inverse of `pack`.

    Args:
        header: header of the message.
        tensors: tensors of the message, which the value keeps.
    """
    left = iter(tensors)
    carriers: list[Tensor] = []

    def give(item: list[Any]) -> Any:
        match item:
            case ["t", carries, given]:
                tensor = next(left)
                if given is not None:
                    tensor = tensor.to(DTYPES[given])
                if carries:
                    carriers.append(tensor.detach().requires_grad_())
                    return _Received.apply(carriers[-1])
                return tensor
            case ["v", value]:
                return value
            case ["l", parts]:
                return [give(part) for part in parts]
            case ["u", parts]:
                return tuple(give(part) for part in parts)
            case ["d", pairs]:
                return {give(key): give(part) for key, part in pairs}
            case _:
                raise AssertionError(f"no header of a boundary: {item!r}")

    value = give(json.loads(header))
    return Boundary(value, tuple(carriers))


class _Received(torch.autograd.Function):
    """What a chunk is given of a leaf: the same memory, which its first operation may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        # No view of the leaf, for views of leaves may not be changed in place.
        alias = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return alias.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def pack_grads(grads: Sequence[Tensor | None], *, dtype: torch.dtype | None, where: str) -> tuple[bytes, list[Tensor]]:
    """Takes gradients of carriers apart for a message.

    Args:
        grads: gradient of each carrier, in order; None for those without one.
        dtype: dtype that they travel in; None: their own.
        where: text that names the place in the model, for errors.
    """
    given: list[str | int] = []
    tensors: list[Tensor] = []
    for grad in grads:
        if grad is None:
            given.append(0)
        elif dtype is not None and grad.dtype != dtype:
            given.append(_name(grad.dtype, where))
            tensors.append(grad.to(dtype))
        else:
            given.append(1)
            tensors.append(grad)
    return json.dumps(given, separators=(",", ":")).encode(), tensors


def unpack_grads(header: bytes, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradient of each carrier; the inverse of `pack_grads`."""
    left = iter(tensors)
    grads: list[Tensor | None] = []
    for given in json.loads(header):
        if given == 0:
            grads.append(None)
        else:
            tensor = next(left)
            grads.append(tensor if given == 1 else tensor.to(DTYPES[given]))
    return grads


def _name(dtype: torch.dtype, where: str) -> str:
    if dtype not in _NAMES:
        raise ModelError(
            f"model: {where} hands on a tensor of {dtype}, which `pipeline.boundary_dtype` cannot convert",
            hint="leave `pipeline.boundary_dtype` out",
        )
    return next(name for name, known in DTYPES.items() if known == dtype)
