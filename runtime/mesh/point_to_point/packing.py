"""How the tensors of a message lie in one run of bytes, and the text that tells the receiver. Moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from dsrun.errors import ModelError

#: Tensors begin at a cache line.
ALIGNMENT_BYTES = 64
#: Packings that are remembered: more than the messages of a model have, and no more than some hundred KB.
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its values.

    Attributes:
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        numel: number of its elements.
        offset: first of its bytes, from the start of the packed tensors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Tensors of a message in one run of bytes.

    Attributes:
        forms: forms of the tensors, in their order.
        nbytes: length of the run.
        text: description that `packing_from` reads.
    """

    forms: tuple[Form, ...]
    nbytes: int
    text: bytes


def align(nbytes: int) -> int:
    """Returns the next place at or behind `nbytes` where a tensor may begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def packing_of(tensors: Sequence[Tensor], *, device_type: str, label: str) -> Packing:
    """Returns the packing of some tensors.

    Args:
        tensors: tensors of a message.
        device_type: type of the device on which they must lie.
        label: name of the message, for errors.

    Raises:
        ModelError: a tensor is sparse, nested or quantized, or lies elsewhere.
    """
    kinds: list[tuple[torch.dtype, tuple[int, ...]]] = []
    for number, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ModelError(
                f"tensor {number} of the message{_named(label)} is {_kind(tensor)}, which is not sent to another rank",
                hint="let the layers at the cuts of the model return dense tensors",
            )
        if tensor.device.type != device_type:
            raise ModelError(
                f"tensor {number} of the message{_named(label)} lies on {tensor.device}, where messages are sent "
                f"from {device_type}",
                hint="let the layers at the cuts of the model return tensors on the engine's device",
            )
        kinds.append((tensor.dtype, tensor.shape))
    return _pack(tuple(kinds))


@lru_cache(maxsize=_REMEMBERED)
def packing_from(text: bytes) -> Packing:
    """Returns the packing that a text of another rank's packing describes."""
    kinds: list[tuple[torch.dtype, tuple[int, ...]]] = []
    for word in text.decode("ascii").split(";"):
        if word:
            name, *lengths = word.split(",")
            dtype = getattr(torch, name)
            assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
            kinds.append((dtype, tuple(map(int, lengths))))
    return _pack(tuple(kinds))


def tensor_at(storage: torch.UntypedStorage, form: Form, *, start: int, device: torch.device) -> Tensor:
    """Returns the tensor that lies in a storage, as one of its own: what is written into others is not its history.

    Views of one flat tensor have one version counter between them, so that writing into one would forbid the backward
    of what has saved another.

    Args:
        storage: bytes that hold packed tensors.
        form: form of the tensor.
        start: offset of the packed tensors in the storage; a multiple of the alignment.
        device: device of the storage.
    """
    tensor = torch.empty(0, dtype=form.dtype, device=device)
    # torch's annotations know of typed storages alone.
    return cast(Any, tensor).set_(storage, (start + form.offset) // form.dtype.itemsize, form.shape)


def places_in(
    packing: Packing, storage: torch.UntypedStorage, *, start: int = 0, device: torch.device
) -> list[Tensor | None]:
    """Returns where the tensors lie in a storage; None for those without elements.

    Args:
        packing: packing of the tensors.
        storage: bytes that hold them.
        start: offset of the packed tensors in the storage; a multiple of the alignment.
        device: device of the storage.
    """
    return [tensor_at(storage, form, start=start, device=device) if form.numel else None for form in packing.forms]


def fill(places: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> None:
    """Copies tensors, which may be strided, to their places."""
    for place, tensor in zip(places, tensors, strict=True):
        if place is not None:
            place.copy_(tensor.detach() if tensor.requires_grad else tensor)


def unpack(packing: Packing, storage: torch.UntypedStorage, *, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the tensors that lie in a storage; they keep it."""
    return tuple(
        tensor_at(storage, form, start=0, device=device)
        if form.numel
        else torch.empty(form.shape, dtype=form.dtype, device=device)
        for form in packing.forms
    )


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Returns how many bytes of values some tensors have."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@lru_cache(maxsize=_REMEMBERED)
def _pack(kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> Packing:
    forms: list[Form] = []
    nbytes = 0
    words: list[str] = []
    for dtype, shape in kinds:
        numel = prod(shape)
        forms.append(Form(dtype, tuple(shape), numel, nbytes))
        nbytes = align(nbytes + numel * dtype.itemsize)
        words.append(",".join([str(dtype).removeprefix("torch."), *map(str, shape)]) + ";")
    return Packing(tuple(forms), nbytes, "".join(words).encode("ascii"))


def _named(label: str) -> str:
    return f" of {label}" if label else ""


def _kind(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return "quantized"
    return "nested" if tensor.is_nested else f"of layout {tensor.layout}"
