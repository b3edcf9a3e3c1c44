"""The collectives among threads of one process: real numbers for N ranks under one debugger. For tests.

Sums go in rank order, as where ranks share memory, so they have the same bits. Ranks in different collectives, or in
ones of different steps, are an error at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from dsrun.errors import ModelError

from .collectives import (
    CountedAllToAll,
    Done,
    NoObserver,
    PartNumels,
    Pending,
    Traffic,
    WaitKind,
    WaitObserver,
    own_slice,
    wait_name,
)
from .step_position import Where
from .sums import reduce_in_order

_Result = TypeVar("_Result")


class MessageQueues:
    """What threads leave for each other, in order by key.

    Args:
        timeout_s: longest wait for an item.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queues: dict[Hashable, deque[object]] = {}
        self._changed = threading.Condition()
        self._is_aborted = False

    def put(self, key: Hashable, item: object) -> None:
        """Leaves an item behind those of the same key."""
        with self._changed:
            self._queues.setdefault(key, deque()).append(item)
            self._changed.notify_all()

    def take(self, key: Hashable) -> object | None:
        """Returns the next item of a key, which is waited for; None where none came in time.

        Raises:
            threading.BrokenBarrierError: the ranks were released, and no item is there.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_aborted or self._queues.get(key), self._timeout_s)
            queue = self._queues.get(key)
            if queue:
                return queue.popleft()
            if self._is_aborted:
                raise threading.BrokenBarrierError
            return None

    def abort(self) -> None:
        """Releases all who wait, by an error."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


class LoopbackWorld:
    """`size` ranks as threads.

    Args:
        size: ranks.
        timeout_s: a rank that waits longer for the others raises `threading.BrokenBarrierError`.
        observers: one a rank, who hear of its waits.

    Attributes:
        messages: messages between two ranks that are under way.
    """

    def __init__(self, size: int, *, timeout_s: float = 30.0, observers: Sequence[WaitObserver] | None = None) -> None:
        self.size = size
        self.observers = [NoObserver()] * size if observers is None else observers
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._posted: list[Tensor | None] = [None] * size
        self._names = [""] * size
        self.places = [Where() for _ in range(size)]
        self._timeout_s = timeout_s
        self.messages = MessageQueues(timeout_s)
        self._peers: dict[tuple[int, ...], LoopbackWorld] = {}
        self._making = threading.Lock()

    def run(self, body: Callable[[LoopbackCollectives], _Result]) -> list[_Result]:
        """Runs `body` once a rank, each in a thread of its own, and returns the results in rank order.

        The first exception of any rank is raised; the others are released from their collectives.
        """

        def guarded(rank: int) -> _Result:
            try:
                return body(LoopbackCollectives(self, rank))
            except BaseException:
                self.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def abort(self) -> None:
        """Releases all ranks from their collectives and from waits for messages, by an error."""
        self._barrier.abort()
        self.messages.abort()
        with self._making:
            for peers in self._peers.values():
                peers.abort()

    def among(self, ranks: tuple[int, ...]) -> LoopbackWorld:
        """Returns the world of some of the ranks, the same one for all of them; in it they are in the same steps."""
        with self._making:
            if ranks not in self._peers:
                peers = LoopbackWorld(
                    len(ranks), timeout_s=self._timeout_s, observers=[self.observers[rank] for rank in ranks]
                )
                peers.places = [self.places[rank] for rank in ranks]
                self._peers[ranks] = peers
            return self._peers[ranks]

    def exchange(self, rank: int, tensor: Tensor, read: Callable[[list[Tensor]], None], *, name: str) -> None:
        """Shows every rank's tensor to `read` on every rank; a tensor may be overwritten only after this returns.

        Raises:
            ModelError: another rank is in another collective, or in one of another step; on every rank.
        """
        started_s = time.perf_counter()
        self.observers[rank].enter(name, WaitKind.THREAD)
        self._posted[rank] = tensor
        self._names[rank] = name
        self._barrier.wait()
        for other in range(self.size):
            if self._names[other] != name or self.places[other].step != self.places[rank].step:
                raise ModelError(
                    f"rank {rank} is in {name}{self.places[rank]} while "
                    f"rank {other} is in {self._names[other]}{self.places[other]}"
                )
        read([posted for posted in self._posted if posted is not None])
        self._barrier.wait()
        self.observers[rank].leave(time.perf_counter() - started_s)


class LoopbackCollectives(CountedAllToAll):
    """One rank of a `LoopbackWorld`; see `Collectives`."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.traffic = Traffic()
        self.where = world.places[rank]

    @property
    def world(self) -> LoopbackWorld:
        """The ranks of this axis."""
        return self._world

    def among(self, ranks: tuple[int, ...]) -> LoopbackCollectives:
        """Returns the collectives of this rank and some others; these where they are all ranks.

        Args:
            ranks: numbers of the ranks, ascending, this one among them.
        """
        if len(ranks) == self.size:
            return self
        return LoopbackCollectives(self._world.among(ranks), ranks.index(self.rank))

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_gather", output_N)
        gathered: list[Tensor] = []
        name = wait_name("all_gather", label)
        self._world.exchange(self.rank, shard_S, lambda shards: gathered.extend(s.clone() for s in shards), name=name)
        output_N.copy_(torch.cat(gathered))
        return Done()

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("reduce_scatter", buffer_N)
        own_slice(buffer_N, rank=self.rank, size=self.size).copy_(
            own_slice(self._reduce(buffer_N, "sum", wait_name("reduce_scatter", label)), rank=self.rank, size=self.size)
        )
        return Done()

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_reduce", buffer_N)
        buffer_N.copy_(self._reduce(buffer_N, op, wait_name(f"all_reduce {op}", label)))
        return Done()

    def broadcast(self, buffer_N: Tensor, *, source: int, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("broadcast", buffer_N)
        copies: list[Tensor] = []
        name = wait_name(f"broadcast from {source}", label)
        self._world.exchange(self.rank, buffer_N, lambda buffers: copies.append(buffers[source].clone()), name=name)
        buffer_N.copy_(copies[0])
        return Done()

    def _exchange(self, output_M: Tensor, input_N: Tensor, parts: PartNumels, label: str) -> Pending:
        sent: list[list[int]] = []
        name = wait_name("all_to_all", label)
        lengths = torch.tensor(parts.send, dtype=torch.int64)
        self._world.exchange(self.rank, lengths, lambda rows: sent.extend(r.tolist() for r in rows), name=name)

        def read(inputs: list[Tensor]) -> None:
            for part, theirs, numels in zip(output_M.split(parts.receive), inputs, sent, strict=True):
                part.copy_(theirs.split(numels)[self.rank])

        self._world.exchange(self.rank, input_N, read, name=name)
        return Done()

    def barrier(self) -> None:
        """See `Collectives`."""
        self.traffic.calls["barrier"] += 1
        self._world.exchange(self.rank, torch.zeros(()), lambda _: None, name="barrier")

    def reading(self, label: str) -> AbstractContextManager[None]:
        """See `Collectives`: `wait` has blocked."""
        del label
        return nullcontext()

    def close(self) -> None:
        """See `Collectives`: there is nothing to let go of."""

    def _reduce(self, buffer_N: Tensor, op: str, name: str) -> Tensor:
        results: list[Tensor] = []

        def read(buffers: list[Tensor]) -> None:
            results.append(torch.empty_like(buffer_N))
            reduce_in_order(buffers, results[0], op)

        self._world.exchange(self.rank, buffer_N, read, name=name)
        return results[0]
