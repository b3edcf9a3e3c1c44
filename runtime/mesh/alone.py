"""The collectives of an axis with one rank: nothing moves but what has to lie elsewhere, and nobody is waited for.

Calls and bytes are counted as on any axis, so what a step would send can be proved at one rank too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .collectives import CountedAllToAll, Done, PartNumels, Pending, Traffic

_DONE = Done()


class AloneCollectives(CountedAllToAll):
    """See `Collectives`; a sum over one rank is the rank's own, so its buffer already holds it."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives`: memory of no special kind."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: a copy, unless the shard is the output."""
        self.traffic.count("all_gather", output_N)
        if output_N.data_ptr() != shard_S.data_ptr():
            output_N.copy_(shard_S)
        return _DONE

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("reduce_scatter", buffer_N)
        return _DONE

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_reduce", buffer_N)
        return _DONE

    def broadcast(self, buffer_N: Tensor, *, source: int, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("broadcast", buffer_N)
        return _DONE

    def _exchange(self, output_M: Tensor, input_N: Tensor, parts: PartNumels, label: str) -> Pending:
        output_M.copy_(input_N)
        return _DONE

    def barrier(self) -> None:
        """See `Collectives`."""
        self.traffic.calls["barrier"] += 1

    def reading(self, label: str) -> AbstractContextManager[None]:
        """See `Collectives`: nobody is waited for."""
        del label
        return nullcontext()

    def close(self) -> None:
        """See `Collectives`: there is nothing to let go of."""
