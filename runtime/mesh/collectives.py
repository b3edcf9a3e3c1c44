"""Collectives over one axis of the mesh: the protocol that its callers own. Who implements it stands in other modules.

Buffers are flat and cut into `size` equal slices; slice r belongs to rank r of the axis. Every rank of the axis must
make the same calls in the same order. Calls and bytes are counted, so tests can prove what a step sends.

[Note: named waits] A rank that blocks in a collective says so, by what it moves (`all_gather of unit 12`): when others
never come, that is the answer to where it hangs. A collective that is only under way is no wait; it becomes one in
`wait`. On CUDA, `wait` blocks the stream and not the host, and the host stands still where it reads a result next. So
who reads one does it inside `reading`, which says what is read and names the collectives that were begun last: one of
them is what the others have not joined. The seconds of such a read are the device's own work as well as waiting, so
they count as none; those for which the stream stood still in each `wait` do. See [Note: seconds of a wait].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Returns when the result may be used: on CUDA, by work enqueued on the current stream from now on."""
        ...


class WaitKind(Enum):
    """What a wait stops."""

    #: The thread, until the other ranks have come.
    THREAD = "thread"
    #: The current stream of the device; the thread goes on at once.
    STREAM = "stream"
    #: The thread, until the device has done its work, in which it may wait for other ranks.
    READ = "read"


class WaitObserver(Protocol):
    """Who hears of waits, see [Note: named waits]; `WaitTimes` is one. One wait at a time, all from one thread."""

    def enter(self, collective: str, kind: WaitKind) -> None:
        """This rank begins to wait in `collective`."""
        ...

    def leave(self, waited_s: float) -> None:
        """The wait is over; it has blocked this thread for so many seconds."""
        ...


class NoObserver:
    """An observer that nobody listens to."""

    def enter(self, collective: str, kind: WaitKind) -> None:
        """See `WaitObserver`."""

    def leave(self, waited_s: float) -> None:
        """See `WaitObserver`."""


@dataclass(slots=True)
class Traffic:
    """What went through one axis: calls and buffer bytes (of the whole flat buffer) by collective."""

    calls: Counter[str] = field(default_factory=Counter[str])
    bytes: Counter[str] = field(default_factory=Counter[str])

    def count(self, collective: str, buffer: Tensor) -> None:
        """Adds one call on `buffer`."""
        self.calls[collective] += 1
        self.bytes[collective] += buffer.numel() * buffer.element_size()

    def since(self, earlier: Traffic) -> Traffic:
        """Returns what went through after `earlier` was taken; these numbers stand still."""
        return Traffic(self.calls - earlier.calls, self.bytes - earlier.bytes)


class Collectives(Protocol):
    """What the runtime asks of one axis; `label` names what is moved, see [Note: named waits]."""

    rank: int
    size: int
    traffic: Traffic

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns flat memory that this axis moves fastest, zeroed; every rank must call, with the same size."""
        ...

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """Fills `output_N` with the shards of all ranks in rank order.

        Args:
            output_N: flat, N = size * S elements; overwritten. No other memory is written.
            shard_S: this rank's shard; may be slice `rank` of `output_N` itself, which saves a copy.
            label: name of the data that is gathered, shown to observers of the wait.
        """
        ...

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """Sums `buffer_N` over the ranks in place; afterwards slice `rank` holds the sum, the rest is undefined."""
        ...

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        """Reduces `buffer_N` over the ranks in place (`op` is `sum` or `max`); the same bits on every rank."""
        ...

    def broadcast(self, buffer_N: Tensor, *, source: int, label: str = "") -> Pending:
        """Overwrites `buffer_N` by that of rank `source` of the axis."""
        ...

    def all_to_all(
        self,
        output_M: Tensor,
        input_N: Tensor,
        *,
        receive_numels: Sequence[int] | None = None,
        send_numels: Sequence[int] | None = None,
        label: str = "",
    ) -> Pending:
        """Sends part r of `input_N` to rank r, for every r; part q of `output_M` comes from rank q.

        Args:
            output_M: flat; overwritten. Shares no memory with `input_N`.
            input_N: flat, of the same dtype; to be left alone until the result may be used.
            receive_numels: elements from each rank, M together; None: M / size from each.
            send_numels: elements to each rank, N together; None: N / size to each. None for both or neither.
            label: name of the data that is moved, shown to observers of the wait.
        """
        ...

    def barrier(self) -> None:
        """Returns when every rank has entered."""
        ...

    def reading(self, label: str) -> AbstractContextManager[None]:
        """Stands around a read by the host of what collectives of this axis gave, behind their `wait`.

        Says what is waited for where `wait` itself blocks no host, and does nothing elsewhere; see [Note: named waits].
        No collective may be begun or waited for inside.

        Args:
            label: name of the data that is read, shown to observers of the wait.
        """
        ...

    def close(self) -> None:
        """Ends the use of this axis; no collective may follow."""
        ...


def own_slice(buffer_N: Tensor, *, rank: int, size: int) -> Tensor:
    """Returns the view of slice `rank`; `buffer_N` must divide into `size` slices."""
    shard, rest = divmod(buffer_N.numel(), size)
    assert rest == 0, f"buffer of {buffer_N.numel()} elements does not divide into {size} slices"
    return buffer_N.narrow(0, rank * shard, shard)


def part_numels(buffer_N: Tensor, numels: Sequence[int] | None, *, size: int) -> list[int]:
    """Returns the lengths of a buffer's parts, one a rank: as given, or even; they must add up to the buffer."""
    parts = [own_slice(buffer_N, rank=0, size=size).numel()] * size if numels is None else list(numels)
    assert len(parts) == size, f"{len(parts)} parts for {size} ranks"
    assert sum(parts) == buffer_N.numel(), f"parts {parts} of a buffer of {buffer_N.numel()} elements"
    return parts


@dataclass(frozen=True, slots=True)
class PartNumels:
    """Lengths of the parts of an all-to-all on one rank.

    Attributes:
        receive: elements from each rank.
        send: elements to each rank.
        are_given: whether the caller has said them, so that other ranks may have said what does not fit.
    """

    receive: list[int]
    send: list[int]
    are_given: bool


class CountedAllToAll(ABC):
    """The call of `Collectives.all_to_all`, which counts and checks; how parts move is left to `_exchange`."""

    size: int
    traffic: Traffic

    def all_to_all(
        self,
        output_M: Tensor,
        input_N: Tensor,
        *,
        receive_numels: Sequence[int] | None = None,
        send_numels: Sequence[int] | None = None,
        label: str = "",
    ) -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_to_all", input_N)
        receive = part_numels(output_M, receive_numels, size=self.size)
        send = part_numels(input_N, send_numels, size=self.size)
        return self._exchange(output_M, input_N, PartNumels(receive, send, send_numels is not None), label)

    @abstractmethod
    def _exchange(self, output_M: Tensor, input_N: Tensor, parts: PartNumels, label: str) -> Pending:
        """Moves the parts; arguments as in `all_to_all`."""


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """Returns at once."""


def wait_name(collective: str, label: str) -> str:
    """Returns how a wait in `collective` is called, see [Note: named waits]."""
    return f"{collective} of {label}" if label else collective
