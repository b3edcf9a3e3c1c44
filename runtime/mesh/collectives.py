"""Collectives over one axis of the mesh: a protocol owned by its callers, and its torch.distributed implementations.

Buffers are flat and cut into `size` equal slices; slice r belongs to rank r of the axis. Every rank of the axis must
make the same calls in the same order. Calls and bytes are counted, so tests can prove what a step sends.

[Note: named waits] A rank that blocks in a collective says so, by what it moves (`all_gather of unit 12`): when others
never come, that is the answer to where it hangs. A collective that is only under way is no wait; it becomes one in
`wait`. On CUDA, `wait` blocks the stream and not the host, so no seconds are counted there, and a hang shows where the
host reads a result next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat import all_gather_single, reduce_scatter_single


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Returns when the result may be used: on CUDA, by work enqueued on the current stream from now on."""
        ...


class WaitObserver(Protocol):
    """Who hears of waits, see [Note: named waits]; `HeartbeatWriter` is one."""

    def enter(self, collective: str) -> None:
        """This rank begins to wait in `collective`."""
        ...

    def leave(self, waited_s: float) -> None:
        """The wait is over; it has blocked this thread for so many seconds."""
        ...


class Unobserved:
    """An observer that nobody listens to."""

    def enter(self, collective: str) -> None:
        """See `WaitObserver`."""

    def leave(self, waited_s: float) -> None:
        """See `WaitObserver`."""


@dataclass(slots=True)
class Where:
    """The step a rank is in: the engine keeps it up to date, errors of collectives name it. One for all axes of a rank.

    Attributes:
        step: the optimizer step under way, counted from 1; 0 before the first one.
        micro_step: the micro step of it, counted from 1.
    """

    step: int = 0
    micro_step: int = 0

    def at(self, step: int, micro_step: int) -> None:
        """Says which step begins; once a micro step."""
        self.step = step
        self.micro_step = micro_step

    def __str__(self) -> str:
        return f"step {self.step}, micro step {self.micro_step}" if self.step else "no step yet"


@dataclass(slots=True)
class Traffic:
    """What went through one axis: calls and buffer bytes (of the whole flat buffer) by collective."""

    calls: Counter[str] = field(default_factory=Counter[str])
    bytes: Counter[str] = field(default_factory=Counter[str])

    def count(self, collective: str, buffer: Tensor) -> None:
        """Adds one call on `buffer`."""
        self.calls[collective] += 1
        self.bytes[collective] += buffer.numel() * buffer.element_size()


class Collectives(Protocol):
    """What the runtime asks of one axis; `of` names what is moved, see [Note: named waits]."""

    rank: int
    size: int
    traffic: Traffic

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns flat memory that this axis moves fastest, zeroed; every rank must call, with the same size."""
        ...

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, of: str = "") -> Pending:
        """Fills `output_N` with the shards of all ranks in rank order.

        Args:
            output_N: flat, N = size * S elements; overwritten. No other memory is written.
            shard_S: this rank's shard; may be slice `rank` of `output_N` itself, which saves a copy.
            of: what is gathered, for who watches.
        """
        ...

    def reduce_scatter(self, buffer_N: Tensor, *, of: str = "") -> Pending:
        """Sums `buffer_N` over the ranks in place; afterwards slice `rank` holds the sum, the rest is undefined."""
        ...

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", of: str = "") -> Pending:
        """Reduces `buffer_N` over the ranks in place (`op` is `sum` or `max`); the same bits on every rank."""
        ...

    def broadcast(self, buffer_N: Tensor, *, source: int, of: str = "") -> Pending:
        """Overwrites `buffer_N` by that of rank `source` of the axis."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has entered."""
        ...

    def close(self) -> None:
        """Ends the use of this axis; no collective may follow."""
        ...


def own_slice(buffer_N: Tensor, *, rank: int, size: int) -> Tensor:
    """Returns the view of slice `rank`; `buffer_N` must divide into `size` slices."""
    shard, rest = divmod(buffer_N.numel(), size)
    assert rest == 0, f"buffer of {buffer_N.numel()} elements does not divide into {size} slices"
    return buffer_N.narrow(0, rank * shard, shard)


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """Returns at once."""


def wait_name(collective: str, of: str) -> str:
    """Returns how a wait in `collective` is called, see [Note: named waits]."""
    return f"{collective} of {of}" if of else collective


class _Works:
    """torch.distributed works under one handle.

    Args:
        works: what was started.
        name: of the whole, for the observer.
        observer: hears of the wait.
        blocks_host: whether `wait` blocks the thread that calls it.
        ended: called once they have been waited for.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        name: str,
        observer: WaitObserver,
        *,
        blocks_host: bool,
        ended: Callable[[], None],
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._name = name
        self._observer = observer
        self._blocks_host = blocks_host
        self._ended = ended

    def wait(self) -> None:
        """Waits for each work; the second call returns at once. After an error the name stays with the observer."""
        works, self._works = self._works, []
        if not works:
            return
        self._observer.enter(self._name)
        started_s = time.perf_counter()
        for work in works:
            work.wait()
        self._observer.leave(time.perf_counter() - started_s if self._blocks_host else 0.0)
        self._ended()


_REDUCE_OPS: dict[str, Callable[[], dist.ReduceOp.RedOpType]] = {
    "sum": lambda: dist.ReduceOp.SUM,
    "max": lambda: dist.ReduceOp.MAX,
}


class C10dCollectives:
    """torch.distributed over one process group: the calls that every backend does well.

    Args:
        group: the axis.
        observer: hears of waits.
    """

    def __init__(self, group: dist.ProcessGroup, observer: WaitObserver | None = None) -> None:
        self.group = group
        self._observer = Unobserved() if observer is None else observer
        self._blocks_host = dist.get_backend(group) != "nccl"
        self._under_way = 0
        self.rank = group.rank()
        self.size = group.size()
        self.traffic = Traffic()

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives`: memory of no special kind."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, of: str = "") -> Pending:
        """See `Collectives`: one all-gather."""
        self.traffic.count("all_gather", output_N)
        return self._pending("all_gather", of, all_gather_single(output_N, shard_S, group=self.group, async_op=True))

    def reduce_scatter(self, buffer_N: Tensor, *, of: str = "") -> Pending:
        """See `Collectives`: one reduce-scatter in place."""
        self.traffic.count("reduce_scatter", buffer_N)
        shard = own_slice(buffer_N, rank=self.rank, size=self.size)
        work = reduce_scatter_single(shard, buffer_N, group=self.group, async_op=True)
        return self._pending("reduce_scatter", of, work)

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", of: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_reduce", buffer_N)
        work = dist.all_reduce(buffer_N, op=_REDUCE_OPS[op](), group=self.group, async_op=True)
        return self._pending("all_reduce", of, work)

    def broadcast(self, buffer_N: Tensor, *, source: int, of: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("broadcast", buffer_N)
        work = dist.broadcast(buffer_N, group_src=source, group=self.group, async_op=True)
        return self._pending("broadcast", of, work)

    def barrier(self) -> None:
        """See `Collectives`: an all-reduce of one number, which unlike c10d's barrier needs no device to be named."""
        self.traffic.calls["barrier"] += 1
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        work = dist.all_reduce(torch.zeros(1, device=device), group=self.group, async_op=True)
        self._pending("barrier", "", work).wait()

    def close(self) -> None:
        """Lets go of the group, whose threads end with its last reference; no collective may follow."""
        del self.group

    @property
    def is_idle(self) -> bool:
        """Whether every collective that was begun here has been waited for."""
        return not self._under_way

    def _pending(self, collective: str, of: str, *works: dist.Work | None) -> Pending:
        self._under_way += 1
        return _Works(works, wait_name(collective, of), self._observer, blocks_host=self._blocks_host, ended=self._end)

    def _end(self) -> None:
        self._under_way -= 1


class GlooCollectives(C10dCollectives):
    """Gloo, by the calls it does well.

    Measured with two ranks on one host and 16 MiB of fp32: all_gather_into_tensor 8.6 ms, a broadcast of each slice
    3.0 ms; reduce_scatter_tensor 10.3 ms, all_reduce 7.2 ms. So slices are broadcast, and sums are all-reduced.
    The all-reduce also makes the bits of stage 0 and of the sharded stages the same at every world size.
    """

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, of: str = "") -> Pending:
        """See `Collectives`: each rank broadcasts its slice."""
        self.traffic.count("all_gather", output_N)
        mine = own_slice(output_N, rank=self.rank, size=self.size)
        if mine.data_ptr() != shard_S.data_ptr():
            mine.copy_(shard_S)
        works = [
            dist.broadcast(
                own_slice(output_N, rank=source, size=self.size), group_src=source, group=self.group, async_op=True
            )
            for source in range(self.size)
        ]
        return self._pending("all_gather", of, *works)

    def reduce_scatter(self, buffer_N: Tensor, *, of: str = "") -> Pending:
        """See `Collectives`: one all_reduce, of which a rank uses its slice."""
        self.traffic.count("reduce_scatter", buffer_N)
        work = dist.all_reduce(buffer_N, group=self.group, async_op=True)
        return self._pending("reduce_scatter", of, work)
