"""Keeps a slice of each tensor on each rank of an axis whose ranks hold the same tensor, and gathers it again.

Tensor-parallel ranks compute the same input of a block: a rank that keeps all of it keeps what the others keep too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...mesh.collectives import Collectives
from .flat import Form, as_line
from .keeper import Keeper, Ticket


class PartitionKeeper:
    """A keeper, see keeper.[Note: keepers].

    Args:
        axis: ranks that hold the same tensors. Every rank of it must take what it put, in the same order: taking is
            one all-gather of the tensor, padded so that its elements divide.
        inner: keeper of the slices.
    """

    def __init__(self, axis: Collectives, inner: Keeper) -> None:
        self._axis = axis
        self._inner = inner

    @property
    def device_bytes(self) -> int:
        """See `Keeper`."""
        return self._inner.device_bytes

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`; no collective is entered."""
        if self._axis.size == 1:
            return self._inner.put(tensor, label=label)
        line_N, form = as_line(tensor)
        numel = -(-form.numel // self._axis.size)
        start = min(form.numel, self._axis.rank * numel)
        mine = line_N[start : start + numel]
        # A copy: a view would keep the whole tensor.
        shard_S = torch.zeros(numel, dtype=form.dtype, device=tensor.device)
        shard_S[: mine.numel()] = mine
        return _Part(self._axis, self._inner.put(shard_S, label=label), form)


class _Part:
    def __init__(self, axis: Collectives, shard: Ticket, form: Form) -> None:
        self._axis = axis
        self._shard = shard
        self._form = form

    def take(self) -> Tensor:
        shard_S = self._shard.take()
        whole = torch.empty(shard_S.numel() * self._axis.size, dtype=shard_S.dtype, device=shard_S.device)
        self._axis.all_gather(whole, shard_S, label="partitioned activations").wait()
        return self._form.of(whole[: self._form.numel])
