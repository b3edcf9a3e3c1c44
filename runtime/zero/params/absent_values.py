"""A tensor that says its shape and dtype and has no values: what a state dict holds of a parameter that is elsewhere.

Programs read keys and shapes of a state dict (loaders above all). Whoever asks for a value is refused by name: numbers
that are not there must not look like numbers, nor like a tensor that may be saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...compat import unseen_by_modes


def accessors(*names: str) -> set[Any]:
    """Returns what reads and writes these attributes of a tensor, as a torch function is told of them."""
    return {getattr(Tensor, name).__get__ for name in names} | {getattr(Tensor, name).__set__ for name in names}


#: Functions that ask for what a tensor without values knows as well.
OF_NO_VALUES = frozenset(
    accessors("shape", "dtype", "device", "requires_grad", "grad", "ndim", "layout", "is_leaf", "is_cuda", "is_meta")
    | accessors("grad_fn", "nbytes", "itemsize")
    | {Tensor.size, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.element_size, Tensor.requires_grad_}
    | {Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__, Tensor.ndimension}
)
_ALLOWED = OF_NO_VALUES | {Tensor.__len__, Tensor.stride, Tensor.is_contiguous}
_DATA: Any = Tensor.data


class AbsentTensor(Tensor):
    """Shape and dtype of a tensor, on the meta device; everything that needs its values is refused.

    Attributes:
        label: name of the tensor that this one stands for, for messages.
    """

    label: str

    @classmethod
    def of(cls, tensor: Tensor, label: str) -> AbsentTensor:
        """Makes one in the shape and dtype of `tensor`."""
        with unseen_by_modes():
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(cls)
        made.label = label
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers what needs no values."""
        if func == _DATA.__get__:
            return args[0]
        if func in _ALLOWED:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _refusal(_first([*args, *(kwargs or {}).values()]), getattr(func, "__name__", str(func)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file without the values would look like one with them."""
        raise _refusal(self, "saving")

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy would stand for nothing."""
        raise _refusal(self, "copying")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AbsentTensor({self.label}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)


def _first(values: Sequence[Any]) -> AbsentTensor | None:
    for value in values:
        if isinstance(value, AbsentTensor):
            return value
        if isinstance(value, list | tuple) and (found := _first(value)) is not None:
            return found
    return None


def _refusal(tensor: AbsentTensor | None, asked: str) -> ModelError:
    label = "a tensor of a state dict" if tensor is None else tensor.label
    return ModelError(
        f"{label} is sharded: at ZeRO stage 3 no rank holds the whole model, and {asked} asks for values",
        hint="use engine.module_state_dict() or engine.save_checkpoint, or call state_dict() inside "
        "dsrun.zero.GatheredParameters(module.parameters())",
    )
