"""Collectives of CPU ranks on several hosts: memory that ranks share inside of each host, and Gloo between hosts.

A rank keeps its slice, and a sum keeps its order: results have the bits that they have on one host. So no host sends
sums of its own ranks: a rank sends each rank of another host its slice as it is, and the owner adds all slices up in
rank order. What is gathered goes to each other host once, and is copied on there.

[Note: two legs] A collective begins with its network leg: sends and receives, which Gloo carries on by itself. The leg
inside of the host is done when the collective is waited for; those begun before it are finished first, so all ranks of
a host finish in the order in which they began. Legs of the network do not wait for each other, so a gather does not
stand behind a reduction.

[Note: tags] Sends carry a tag made of the collective, what it moves, its length and the step. Ranks in different ones
never exchange data: they wait in vain, and then tell each other where they are, see `mesh/last_positions.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..c10d import C10dCollectives
from ..collectives import Pending, WaitKind, WaitObserver, own_slice, wait_name
from ..step_position import Where
from ..sums import cut_pieces, cut_spans, reduce_in_order
from .collectives import SharedMemoryCollectives, Span

#: What a rank receives at once from each rank of the other hosts, where it adds up.
_PIECE_BYTES = 1 << 18
#: Pieces of a sum that are under way from each rank at the same time.
_WINDOW = 4
#: Below this every rank gets all buffers and adds up by itself: one leg, not two.
_SMALL_BYTES = 1 << 16
#: A rank that waits for one of its host gives up later than that one gives up the network: the cause comes first.
_LATER_S = 10.0


def carrier_of(rank: int, host: Sequence[int], hosts: Sequence[Sequence[int]]) -> int:
    """Returns who on `host` receives what `rank` of another host sends to all: its counterpart, as far as there are."""
    home = next(each for each in hosts if rank in each)
    return host[home.index(rank) % len(host)]


@dataclass(slots=True)
class _Begun:
    """A collective whose network leg is under way.

    Attributes:
        owner: collectives that have this one in their queue.
        finish: the rest of it.
        is_over: whether that was done.
    """

    owner: HierarchicalCollectives
    finish: Callable[[], None]
    is_over: bool = False

    def wait(self) -> None:
        """Finishes this collective, and those that began before it."""
        self.owner.finish_until(self)


@dataclass(slots=True)
class _Messages:
    """What is under way between this rank and those of other hosts: who is waited for, and torch's handle."""

    waits: list[tuple[int, dist.Work | None]] = field(default_factory=list[tuple[int, "dist.Work | None"]])


class HierarchicalCollectives(C10dCollectives):
    """See the module; every rank of the group must make one, and make the same calls.

    Args:
        group: the axis, over Gloo.
        observer: observer that is told of this rank's waits; None for no observer.
        inside: those ranks of the axis that are on this rank's host. Used to set up, not to move data.
        hosts: ranks of the axis by host, each rank once, ascending in each host; the same on every rank.
        timeout_s: longest wait for the other ranks.
        where: the step this rank is in.

    Raises:
        OSError: the ranks of some host cannot share memory; on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        observer: WaitObserver | None = None,
        *,
        inside: dist.ProcessGroup,
        hosts: Sequence[Sequence[int]],
        timeout_s: float,
        where: Where | None = None,
    ) -> None:
        super().__init__(group, observer, where=where, device=torch.device("cpu"))
        self._hosts = [list(host) for host in hosts]
        self._here = next(host for host in self._hosts if self.rank in host)
        self._remote = [rank for rank in range(self.size) if rank not in self._here]
        failure: OSError | None = None
        shared: SharedMemoryCollectives | None = None
        try:
            shared = SharedMemoryCollectives(inside, timeout_s=timeout_s + _LATER_S, where=self._where)
        except OSError as error:
            failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int32)
        dist.all_reduce(failed, group=group)
        if shared is None or failed.item():
            raise failure or OSError("the ranks of another host could not share memory")
        self._inside = shared
        #: Seconds that this rank has waited for other hosts so far; what it copies and adds up itself is no wait.
        self._waited_s = 0.0
        self._queue: deque[_Begun] = deque()

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives`: memory that the peers of this host read where it is."""
        return self._inside.zeros(numel, dtype=dtype, device=device)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: each shard goes to each other host once."""
        self.traffic.count("all_gather", output_N)
        mine = own_slice(output_N, rank=self.rank, size=self.size)
        if mine.data_ptr() != shard_S.data_ptr():
            mine.copy_(shard_S)
        return self._begin("all_gather", label, lambda name: self._gather(output_N, self._slices(output_N), name))

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: each rank adds up its slice of all buffers."""
        self.traffic.count("reduce_scatter", buffer_N)
        return self._begin(
            "reduce_scatter", label, lambda name: self._reduce(buffer_N, self._slices(buffer_N), "sum", name)
        )

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        """See `Collectives`: each rank reduces a span, which is then gathered; all of it where that is little."""
        self.traffic.count("all_reduce", buffer_N)
        return self._begin(f"all_reduce {op}", label, lambda name: self._all_reduce(buffer_N, op, name))

    def broadcast(self, buffer_N: Tensor, *, source: int, label: str = "") -> Pending:
        """See `Collectives`: once to each other host, and there to all."""
        self.traffic.count("broadcast", buffer_N)
        spans = [(0, buffer_N.numel() if rank == source else 0) for rank in range(self.size)]
        return self._begin(f"broadcast from {source}", label, lambda name: self._gather(buffer_N, spans, name))

    def barrier(self) -> None:
        """See `Collectives`."""
        self.traffic.calls["barrier"] += 1
        token = torch.zeros(1)
        self._begin("barrier", "", lambda name: self._all_reduce(token, "max", name)).wait()

    def close(self) -> None:
        """See `Collectives`."""
        self._inside.close()
        super().close()

    @property
    def is_idle(self) -> bool:
        """See `C10dCollectives`."""
        return not self._queue and super().is_idle

    def finish_until(self, last: _Begun) -> None:
        """Finishes what was begun, in order, up to `last`."""
        while not last.is_over:
            first = self._queue[0]
            first.finish()
            first.is_over = True
            self._queue.popleft()

    def _begin(self, collective: str, label: str, begin: Callable[[str], Callable[[], None]]) -> Pending:
        """Starts the network leg of a collective, see [Note: two legs].

        Args:
            collective: name of the collective, such as `all_gather`.
            label: name of the data that the collective moves.
            begin: function that gets the name made of `collective` and `label`, starts the network leg, and returns the
                function that finishes the collective.
        """
        name = wait_name(collective, label)
        finish = begin(name)

        def observed() -> None:
            self._observer.enter(name, WaitKind.THREAD)
            waited_before_s = self._waited_s + self._inside.waited_s
            finish()
            self._observer.leave(self._waited_s + self._inside.waited_s - waited_before_s)

        begun = _Begun(self, observed)
        self._queue.append(begun)
        return begun

    def _gather(self, buffer_N: Tensor, spans: Sequence[Span], name: str) -> Callable[[], None]:
        """Begins to fill a buffer of which every rank has one span, without those that are empty."""
        tag = self._tag(name, "gather", buffer_N)
        messages = _Messages()
        held: list[list[Span]] = [[] for _ in self._here]
        for rank, (start, end) in enumerate(spans):
            if start == end:
                continue
            carrier = rank if rank in self._here else carrier_of(rank, self._here, self._hosts)
            held[self._here.index(carrier)].append((start, end))
            if carrier == self.rank and rank != self.rank:
                self._receive(messages, buffer_N[start:end], rank, tag, name)
        start, end = spans[self.rank]
        for host in self._hosts:
            if host is not self._here and start < end:
                self._send(messages, buffer_N[start:end], carrier_of(self.rank, host, self._hosts), tag, name)

        def finish() -> None:
            self._wait_for(messages, name)
            self._inside.spread(buffer_N, held, collective=name, label="").wait()

        return finish

    def _reduce(self, buffer_N: Tensor, spans: Sequence[Span], op: str, name: str) -> Callable[[], None]:
        """Begins to reduce this rank's span of all buffers into its own."""
        tag = self._tag(name, "reduce", buffer_N)
        numel = _PIECE_BYTES // buffer_N.element_size()
        sent = _Messages()
        for rank in self._remote:
            for start, end in cut_pieces(*spans[rank], numel=numel):
                self._send(sent, buffer_N[start:end], rank, tag, name)
        pieces = cut_pieces(*spans[self.rank], numel=numel)
        window = min(_WINDOW, len(pieces))
        rows = torch.empty(window * len(self._remote) * numel, dtype=buffer_N.dtype).view(
            window, len(self._remote), numel
        )
        arriving: deque[_Messages] = deque()

        def receive(number: int) -> None:
            if number < len(pieces):
                start, end = pieces[number]
                arriving.append(_Messages())
                for row, rank in zip(rows[number % window], self._remote, strict=True):
                    self._receive(arriving[-1], row[: end - start], rank, tag, name)

        for number in range(window):
            receive(number)
        begin = spans[self.rank][0]

        def fold(start: int, end: int, ours: list[Tensor]) -> None:
            number, at = divmod(start - begin, numel)
            if at == 0:
                self._wait_for(arriving.popleft(), name)
            theirs = iter(rows[number % window])
            local = iter(ours)
            terms = [
                next(local) if rank in self._here else next(theirs)[at : at + end - start] for rank in range(self.size)
            ]
            reduce_in_order(terms, buffer_N[start:end], op)
            if begin + number * numel + numel <= end:
                receive(number + window)

        def finish() -> None:
            mine = [spans[rank] for rank in self._here]
            self._inside.fold(buffer_N, mine, fold, collective=name, label="", piece_numel=numel).wait()
            self._wait_for(sent, name)

        return finish

    def _all_reduce(self, buffer_N: Tensor, op: str, name: str) -> Callable[[], None]:
        if buffer_N.numel() * buffer_N.element_size() > _SMALL_BYTES:
            spans = cut_spans(buffer_N.numel(), self.size)
            reduce = self._reduce(buffer_N, spans, op, name)

            def reduce_and_gather() -> None:
                reduce()
                self._gather(buffer_N, spans, name)()

            return reduce_and_gather
        everyone = buffer_N.new_empty(self.size * buffer_N.numel())
        own_slice(everyone, rank=self.rank, size=self.size).copy_(buffer_N)
        gather = self._gather(everyone, self._slices(everyone), name)

        def gather_and_reduce() -> None:
            gather()
            reduce_in_order(everyone.view(self.size, -1).unbind(), buffer_N, op)

        return gather_and_reduce

    def _slices(self, buffer_N: Tensor) -> list[Span]:
        shard = own_slice(buffer_N, rank=0, size=self.size).numel()
        return [(rank * shard, (rank + 1) * shard) for rank in range(self.size)]

    def _tag(self, name: str, leg: str, buffer_N: Tensor) -> int:
        """Returns a tag, see [Note: tags]; Gloo takes 31 bits."""
        text = f"{name} {leg} {buffer_N.numel()} {buffer_N.dtype} {self._where.step}"
        return crc32(text.encode()) & 0x7FFFFFFF

    def _send(self, messages: _Messages, part: Tensor, rank: int, tag: int, name: str) -> None:
        try:
            messages.waits.append((rank, dist.isend(part, group_dst=rank, group=self.group, tag=tag)))
        except (dist.DistError, RuntimeError) as error:
            raise self._failure(f"{name}, for rank {self._ranks[rank]},", error) from error

    def _receive(self, messages: _Messages, part: Tensor, rank: int, tag: int, name: str) -> None:
        try:
            messages.waits.append((rank, dist.irecv(part, group_src=rank, group=self.group, tag=tag)))
        except (dist.DistError, RuntimeError) as error:
            raise self._failure(f"{name}, for rank {self._ranks[rank]},", error) from error

    def _wait_for(self, messages: _Messages, name: str) -> None:
        began_s = time.perf_counter()
        for rank, work in messages.waits:
            try:
                if work is not None:
                    work.wait()
            except (dist.DistError, RuntimeError) as error:
                raise self._failure(f"{name}, for rank {self._ranks[rank]},", error) from error
        self._waited_s += time.perf_counter() - began_s
