"""What a block saves for backward, put somewhere else without running the block again."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..keep.keeper import Keeper, Ticket
from .stubs import is_parameter

#: Smaller tensors stay where they are: a copy of their own costs more than they hold.
_SMALLEST_BYTES = 16 << 10


class Stash:
    """The saved tensors of one call.

    A tensor that several operations save is kept once. To know it again it is held until the call ends, so that its
    address is not another's.

    Args:
        keeper: keeper of saved tensors that are large enough and no parameters.
        label: the block, as errors name it.
    """

    def __init__(self, keeper: Keeper, *, label: str = "") -> None:
        self._keeper = keeper
        self._of = label
        self._seen: dict[Any, tuple[Tensor, Ticket]] = {}

    def begin(self) -> saved_tensors_hooks:
        """Returns the hooks under which the call is made."""
        return saved_tensors_hooks(self._put, _take)

    def end(self) -> None:
        """The call has ended."""
        self._seen.clear()

    def _put(self, tensor: Tensor) -> Tensor | Ticket:
        if tensor.nbytes < _SMALLEST_BYTES or is_parameter(tensor):
            return tensor.detach()  # with its graph, a node that saves its own output would never be freed
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._seen:
            self._seen[key] = (tensor.detach(), self._keeper.put(tensor, label=self._of))
        return self._seen[key][1]


def _take(kept: Tensor | Ticket) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.take()
