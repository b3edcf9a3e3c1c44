"""Host memory for copies that are made again and again: page-locked memory of the last ones serves the next.

To page-lock 10 GB takes seconds, each time anew. What is pageable is not kept: the kernel has it back at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .host_pool import HostPool


class ReusedMemory:
    """Makes host memory, of what was given back where that fits.

    Args:
        pool: pool that makes new memory.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._spare: list[Tensor] = []

    @property
    def spare_bytes(self) -> int:
        """Host memory that nobody uses now."""
        return sum(memory.nbytes for memory in self._spare)

    def take(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Returns flat host memory; what it holds is undefined."""
        for place, memory in enumerate(self._spare):
            if memory.numel() == numel and memory.dtype == dtype:
                return self._spare.pop(place)
        return self._pool.zeros(numel, dtype=dtype)

    def give_back(self, memory: Tensor) -> None:
        """Ends the use of what `take` has returned; no copy reads or writes it any more."""
        if self._pool.pins:
            self._spare.append(memory)

    def drop_spare(self) -> None:
        """Gives what nobody uses back to the system."""
        self._spare.clear()
