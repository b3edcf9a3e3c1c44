"""Where a tensor lives between forward and backward: the seam that every kind of keeping fills.

[Note: keepers]
A *keeper* takes a tensor in forward and returns a *ticket*, which gives the tensor back in backward, as often as it is
asked. What a keeper holds for a ticket it may use again once the ticket is gone: tickets are held by autograd's graph,
so this happens by itself, also where a loss is dropped without a backward. Keepers are put inside one another: one
that cuts tensors over ranks hands its slice to one that has a pinned ring.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

from dsrun.errors import ModelError


class Ticket(Protocol):
    """One kept tensor."""

    def take(self) -> Tensor:
        """Returns the tensor: its values, shape and dtype, on its device, without a graph."""
        ...


class Keeper(Protocol):
    """See [Note: keepers]."""

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """Keeps the values that `tensor` has now.

        Args:
            tensor: tensor to keep.
            label: the block that wants it again, as errors name it.
        """
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes that this keeper holds now in the memory that kernels compute in."""
        ...


class AsItIs:
    """Keeps the tensor itself: no copy, so it must not change in place."""

    def __init__(self) -> None:
        self._held = 0

    @property
    def device_bytes(self) -> int:
        """See `Keeper`: a tensor that the script holds as well counts too."""
        return self._held

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`."""
        self._held += tensor.nbytes
        return _Same(tensor.detach(), tensor._version, self)

    def forget(self, nbytes: int) -> None:
        """A ticket of this size is gone."""
        self._held -= nbytes


class _Same:
    def __init__(self, tensor: Tensor, version: int, keeper: AsItIs) -> None:
        self._tensor = tensor
        self._version = version
        self._keeper = keeper

    def __del__(self) -> None:
        self._keeper.forget(self._tensor.nbytes)

    def take(self) -> Tensor:
        if self._tensor._version != self._version:
            raise ModelError(
                f"activation checkpointing: an input of shape {tuple(self._tensor.shape)} was changed in place after "
                "the call that must be run again with it",
                hint="write `x = x + y` in place of `x += y`, or leave this block out by "
                "`activation_checkpointing.blocks`",
            )
        return self._tensor


class KeptOnce:
    """Keeps a tensor that several calls take (an encoder's output) once, as long as it lives and does not change.

    Args:
        inner: keeper that stores the tensor.
    """

    def __init__(self, inner: Keeper) -> None:
        self._inner = inner
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Ticket]]] = {}

    @property
    def device_bytes(self) -> int:
        """See `Keeper`."""
        return self._inner.device_bytes

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`."""
        key = id(tensor)
        known = self._known.get(key)
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            ticket = known[2]()
            if ticket is not None:
                return ticket
        ticket = self._inner.put(tensor, label=label)
        # The entry leaves with the tensor: its id may be another's then.
        there = weakref.ref(tensor, lambda _, known=self._known, key=key: known.pop(key, None) and None)
        self._known[key] = (there, tensor._version, weakref.ref(ticket))
        return ticket
