"""Keeps tensors side by side in one buffer of a size that is known from the first of them.

Inputs of blocks live from forward to backward while everything else comes and goes: one by one they leave an
allocator's memory in pieces. In one buffer they cannot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsrun.errors import ModelError
from dsrun.units import format_bytes

from ...memory.arena import Arena, room_for
from .flat import Form, as_line
from .keeper import Ticket


class Contiguous:
    """A keeper, see keeper.[Note: keepers].

    Args:
        number: tensors that are kept at once; the buffer has room for so many of the size of the first one.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._arenas: dict[torch.device, Arena] = {}

    @property
    def device_bytes(self) -> int:
        """See `Keeper`: of the buffer, used or not."""
        return sum(arena.use().reserved_bytes for arena in self._arenas.values())

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`.

        Raises:
            ModelError: the buffer is full, or the tensor is larger than those it was made for.
        """
        line_N, form = as_line(tensor)
        arena = self._arenas.get(tensor.device)
        if arena is None:
            arena = self._arenas[tensor.device] = Arena(
                "contiguous activations",
                lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=tensor.device),
                numel=room_for([form.nbytes] * self._number),
            )
        use = arena.use()
        if use.used_bytes + room_for([form.nbytes]) > use.reserved_bytes:
            raise ModelError(
                f"activation checkpointing: `number_checkpoints` is {self._number}, which reserved "
                f"{format_bytes(use.reserved_bytes)}; {format_bytes(use.used_bytes)} are in use and an input of "
                f"{format_bytes(form.nbytes)} does not fit",
                hint="set `activation_checkpointing.number_checkpoints` to the inputs that are kept at once, of all "
                "micro batches whose backward is still to come",
            )
        memory = arena.take(form.nbytes)
        memory.view(form.dtype).copy_(line_N)
        return _Place(arena, memory, form)


class _Place:
    def __init__(self, arena: Arena, memory: Tensor, form: Form) -> None:
        self._arena = arena
        self._memory = memory
        self._form = form

    def __del__(self) -> None:
        self._arena.give_back(self._memory)

    def take(self) -> Tensor:
        return self._form.of(self._memory.view(self._form.dtype))
