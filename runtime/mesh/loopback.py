"""The collectives among threads of one process: real numbers for N ranks under one debugger. For tests.

Sums go in rank order, so they are the same on every rank and in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from .collectives import Done, Pending, Traffic, own_slice

_Result = TypeVar("_Result")


class LoopbackWorld:
    """`size` ranks as threads.

    Args:
        size: ranks.
        timeout_s: a rank that waits longer for the others raises `threading.BrokenBarrierError`.
    """

    def __init__(self, size: int, *, timeout_s: float = 30.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._posted: list[Tensor | None] = [None] * size

    def run(self, body: Callable[[LoopbackCollectives], _Result]) -> list[_Result]:
        """Runs `body` once a rank, each in a thread of its own, and returns the results in rank order.

        The first exception of any rank is raised; the others are released from their collectives.
        """

        def guarded(rank: int) -> _Result:
            try:
                return body(LoopbackCollectives(self, rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def exchange(self, rank: int, tensor: Tensor, read: Callable[[list[Tensor]], None]) -> None:
        """Shows every rank's tensor to `read` on every rank; a tensor may be overwritten only after this returns."""
        self._posted[rank] = tensor
        self._barrier.wait()
        read([posted for posted in self._posted if posted is not None])
        self._barrier.wait()


class LoopbackCollectives:
    """One rank of a `LoopbackWorld`; see `Collectives`."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.traffic = Traffic()

    def all_gather(self, output_N: Tensor, shard_S: Tensor) -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_gather", output_N)
        gathered: list[Tensor] = []
        self._world.exchange(self.rank, shard_S, lambda shards: gathered.extend(s.clone() for s in shards))
        output_N.copy_(torch.cat(gathered))
        return Done()

    def reduce_scatter(self, buffer_N: Tensor) -> Pending:
        """See `Collectives`."""
        self.traffic.count("reduce_scatter", buffer_N)
        own_slice(buffer_N, rank=self.rank, size=self.size).copy_(
            own_slice(self._reduce(buffer_N, "sum"), rank=self.rank, size=self.size)
        )
        return Done()

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_reduce", buffer_N)
        buffer_N.copy_(self._reduce(buffer_N, op))
        return Done()

    def broadcast(self, buffer_N: Tensor, *, source: int) -> Pending:
        """See `Collectives`."""
        self.traffic.count("broadcast", buffer_N)
        copies: list[Tensor] = []
        self._world.exchange(self.rank, buffer_N, lambda buffers: copies.append(buffers[source].clone()))
        buffer_N.copy_(copies[0])
        return Done()

    def barrier(self) -> None:
        """See `Collectives`."""
        self.traffic.calls["barrier"] += 1
        self._world.exchange(self.rank, torch.zeros(()), lambda _: None)

    def close(self) -> None:
        """See `Collectives`: there is nothing to let go of."""

    def _reduce(self, buffer_N: Tensor, op: str) -> Tensor:
        results: list[Tensor] = []

        def read(buffers: list[Tensor]) -> None:
            result = buffers[0].clone()
            for other in buffers[1:]:
                result = torch.maximum(result, other) if op == "max" else result + other
            results.append(result)

        self._world.exchange(self.rank, buffer_N, read)
        return results[0]
