"""Room in host memory for tensors of any size, which is used again. What lies there and when it is copied is others'.

[Note: pieces and the whole]
The first round finds out how much is needed. Page-locking takes milliseconds for the smallest piece and stops the
device, so pieces are larger than what they are made for, in proportion to the pieces there are: a few dozen for any
number of tensors. Before the next round they go, and a whole takes their place, of what was in use at once to the byte.
Should a later round need more, it gets pieces again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...memory.arena import Arena
from ...memory.host_pool import HostPool

#: A page-locked piece has at least one part in so many of all pieces, and so many bytes.
_SHARE = 4
_SMALLEST_BYTES = 2 << 20


class HostRoom:
    """See [Note: pieces and the whole].

    Args:
        pool: pool that makes the host memory.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._whole_bytes = self._added_bytes = self._pieces = 0
        self._arena = self._new_arena(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self._arena.use().reserved_bytes

    def take(self, nbytes: int) -> Tensor:
        """Returns memory for a tensor, uint8, shape [nbytes]; what it holds is undefined."""
        return self._arena.take(nbytes)

    def give_back(self, memory: Tensor) -> None:
        """Takes memory back that `take` returned, also while it is copied from: later copies there come after."""
        self._arena.give_back(memory)

    def begin_round(self, settle: Callable[[], None]) -> None:
        """Makes one piece of several.

        Args:
            settle: function that returns when no copy uses this memory; called before any of it is freed.
        """
        use = self._arena.use()
        assert not use.used_bytes, "a round begins when all is given back"
        if self._pieces < 2:  # the whole is one of them
            return
        settle()
        # More than was in use at once only where lifetimes left holes in a whole that was large enough: then all of
        # it, or it would be made anew each round.
        nbytes = use.high_water_bytes if use.high_water_bytes > self._whole_bytes else use.reserved_bytes
        self._arena = self._new_arena(0)  # first, or twice the memory would be needed
        self._arena = self._new_arena(nbytes)

    def _new_arena(self, whole_bytes: int) -> Arena:
        """Returns an arena that begins with a whole, or with nothing, and grows by pieces."""
        self._whole_bytes, self._added_bytes, self._pieces = whole_bytes, 0, 0
        return Arena("activations in host memory", self._more, numel=whole_bytes, grows=True)

    def _more(self, nbytes: int) -> Tensor:
        """Returns the whole, which an arena asks for first where it has one, or a piece."""
        if nbytes:
            self._pieces += 1
            if self._pool.pins and not (self._whole_bytes and self._pieces == 1):
                wanted = max(self._added_bytes // _SHARE, _SMALLEST_BYTES)
                nbytes *= max(1, -(-wanted // nbytes))  # most tensors have one size: whole ones
                self._added_bytes += nbytes
        return self._pool.zeros(nbytes, dtype=torch.uint8)
