"""Logits as a script gets them: whole, and gathered from the ranks that have some tokens each when they are first used.

Which logits are handed out so is decided in `hugging_face_loss.py`.

[Note: logits gathered when used]
To autograd such logits are a tensor like any other, with a node of their own whose gradient is each rank's part. Below
it they have no memory: the first operation that reaches them gathers the parts, over all ranks of the axis, and runs on
the whole, which is kept for the next. Shape, dtype and device, views that change nothing and what autograd asks of its
nodes are known without. So who makes no use of the logits sends nothing, and all ranks of the axis have to use them
alike: a rank that does so alone waits for the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....compat import without_overrides
from ....kept_results import kept_result
from ....late_compiler import UncompiledFunction
from ..operators import joined, part_of
from .part import VocabularyPart

#: Name of the gathered logits, shown to observers of the wait and so in the verdict of a hang.
LABEL = "logits of the output, whole for the script"
_OPS: Any = torch.ops.aten
#: Operations that give the same values under another history.
_SAME_VALUES = frozenset([_OPS.detach.default, _OPS.alias.default, _OPS.view_as.default])
#: Methods that read memory past torch's operations; those of Python are overridden.
_READ_MEMORY = frozenset(["numpy", "tolist", "data_ptr", "untyped_storage", "storage", "__array__", "__dlpack__"])


def whole_when_used(logits_V: Tensor, part: VocabularyPart) -> Tensor:
    """Returns the whole logits, for whose first use all ranks enter an all-gather.

    All ranks of the part's axis must use them alike, see [Note: logits gathered when used]. The all-gather's label is
    `LABEL`; backward enters no collective.

    Args:
        logits_V: shape [..., tokens], this rank's part; any dtype and device.
        part: tokens that this rank has.

    Returns:
        shape [..., whole], of the dtype and device of the part; differentiable.
    """
    made: Any = _Whole.apply(logits_V, part)
    return made


class WholeLogits(Tensor):
    """Whole logits that may not be there yet, see `whole_when_used`."""

    _gathered: _Gathered

    @staticmethod
    def of(gathered: _Gathered) -> WholeLogits:
        """Returns logits without a history."""
        made: Any = Tensor._make_wrapper_subclass(  # pyright: ignore
            WholeLogits, gathered.shape, dtype=gathered.dtype, device=gathered.device
        )
        made._gathered = gathered
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a function as on any tensor; one that reads memory gets the plain tensor, with the same history."""
        with without_overrides():
            if getattr(func, "__name__", "") in _READ_MEMORY:
                return func(_plain(args[0]), *args[1:], **kwargs or {})
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation below autograd, on whole logits."""
        if func in _SAME_VALUES and isinstance(args[0], WholeLogits):
            return WholeLogits.of(args[0]._gathered)
        return func(*_lifted(args), **_lifted(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Returns a plain tensor."""
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold a plain tensor."""
        return _plain(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self._gathered.is_there:
            return repr(_plain(self))
        return f"WholeLogits(shape={tuple(self.shape)}, dtype={self.dtype}, gathered over ranks when used)"

    def __format__(self, format_spec: str) -> str:
        return format(_plain(self), format_spec) if self.dim() == 0 else repr(self)


class _Gathered:
    """Logits of one output, shared by all that have the same values.

    Args:
        mine_V: this rank's part, without a history.
        part: tokens that this rank has.
    """

    def __init__(self, mine_V: Tensor, part: VocabularyPart) -> None:
        self._mine_V: Tensor | None = mine_V
        self._part = part
        self._whole: Tensor | None = None
        self.shape = (*mine_V.shape[:-1], part.whole)
        self.dtype, self.device = mine_V.dtype, mine_V.device

    @property
    def is_there(self) -> bool:
        """Whether the parts have been gathered."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """Returns the whole logits, without a history; the first time with an all-gather."""
        if self._whole is None:
            assert self._mine_V is not None, "it is let go of where the whole is there"
            mine = self._mine_V
            # The use may be in inference mode, and a later one in training.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._whole = kept_result(lambda: joined(mine, self._part.axis, whole=self._part.whole, label=LABEL))
            self._mine_V = None
        return self._whole


#: Compilers break off at a use that gathers, and go on with what it gives.
_whole_of: Callable[[_Gathered], Tensor] = UncompiledFunction(_Gathered.whole)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_V: Tensor, part: VocabularyPart) -> Tensor:
        ctx.part = part
        return WholeLogits.of(_Gathered(logits_V.detach(), part))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return part_of(grad, ctx.part.axis), None


def _plain(logits: Tensor) -> Tensor:
    """Returns the gathered logits as a plain tensor with the same history."""
    with without_overrides():
        return logits.view(logits.shape)


def _lifted(value: Any) -> Any:
    """Returns arguments with plain tensors in the place of whole logits."""
    if isinstance(value, WholeLogits):
        return _whole_of(value._gathered)  # pyright: ignore[reportPrivateUsage]
    if isinstance(value, list | tuple):
        return type(value)(_lifted(item) for item in value)  # pyright: ignore
    if isinstance(value, Mapping):
        return {key: _lifted(item) for key, item in value.items()}  # pyright: ignore
    return value
