"""Collectives of CPU ranks on one host, through memory that all of them see: no copy that the result does not need.

Buffers made by `zeros` lie in shared segments: peers read them where they are. Others go through a mailbox in pieces.
Sums are made in rank order, in fp32 for the 16-bit formats, so they have the same bits on every rank and in every run.

[Note: two meetings] A collective begins with a meeting, after which every rank's data may be read, and ends with one,
after which every rank's data may be overwritten. All data has moved when the call returns: on a CPU, where the copying
takes the same cores as the computing, there is nothing to overlap with. But a rank that has read what it needs goes on,
and waits for the others to have read theirs in `wait`, or in the next collective: who is ahead need not sleep. A rank
whose peers are in another collective, or in one of another step, says so and raises: mixed up, they would mix data.

[Note: fold and spread] All but the simplest are made of two parts. In a *fold* each rank gets one span of all buffers
and makes one span of them; in a *spread* every span of a buffer is known by one rank, and then by all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.errors import ModelError

from ...compat import all_gather_single
from ..c10d import C10dCollectives
from ..collectives import Done, PartNumels, Pending, WaitKind, WaitObserver, own_slice, wait_name
from ..step_position import Where
from ..sums import cut_pieces, cut_spans, reduce_in_order
from .arenas import SharedArenas
from .segments import share_memory
from .turnstile import Turnstile, turnstile_bytes

#: What a rank copies at once where its data is not shared: two of them fit into a core's cache.
_MAILBOX_BYTES = 1 << 20
#: Below this a rank adds up a whole buffer by itself, which saves a meeting.
_SMALL_BYTES = 1 << 16
_DONE = Done()


class _Moved:
    """A collective whose data has moved, and whose last meeting is to be ended, see [Note: two meetings]."""

    def __init__(self, axis: SharedMemoryCollectives, name: str) -> None:
        self._axis = axis
        self.name = name

    def wait(self) -> None:
        """Returns once every rank has read what it needs of this one's."""
        self._axis.settle(self)


#: Where a span of a flat buffer begins and ends, in elements.
Span = tuple[int, int]
#: Makes a span of this rank's buffer out of the same span of the buffers of all ranks, which come in rank order.
Fold = Callable[[int, int, list[Tensor]], None]


def exchange_over(group: dist.ProcessGroup) -> Callable[[Sequence[int]], list[list[int]]]:
    """Returns what tells all ranks of a group some whole numbers, see `segments.Exchange`."""

    def exchange(mine: Sequence[int]) -> list[list[int]]:
        if group.size() == 1:
            # Gloo would wake a thread for it, which may outlive the script: see [Note: leaving] in groups.
            return [list(mine)]
        told = torch.tensor(list(mine), dtype=torch.int64)
        everyone = torch.empty(group.size() * told.numel(), dtype=torch.int64)
        all_gather_single(everyone, told, group=group)
        return everyone.view(group.size(), -1).tolist()

    return exchange


class SharedMemoryCollectives(C10dCollectives):
    """See the module; every rank of the group must make one, and make the same calls.

    Args:
        group: the axis; its ranks share a host, see `segments.find_hosts`. Used to set up, not to move data.
        observer: observer that is told of this rank's waits; None for no observer.
        timeout_s: longest wait for the other ranks.
        where: the step this rank is in: compared with the others', and for errors.

    Raises:
        OSError: no memory can be shared; on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        observer: WaitObserver | None = None,
        *,
        timeout_s: float,
        where: Where | None = None,
    ) -> None:
        super().__init__(group, observer, where=where, device=torch.device("cpu"))
        exchange = exchange_over(group)
        processes = [process for (process,) in exchange([os.getpid()])]
        places = share_memory(turnstile_bytes(self.size), exchange)
        self._turnstile = Turnstile(places, rank=self.rank, processes=processes, names=self._ranks, timeout_s=timeout_s)
        self._arenas = SharedArenas(self.rank, exchange, mailbox_bytes=_MAILBOX_BYTES)
        self._heard: list[tuple[int, int, int, int, int]] = []
        #: The last collective, until its last meeting is over.
        self._moved: _Moved | None = None
        # Nobody may come to the turnstile before all have made theirs.
        exchange([1])

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives`: memory that the peers read where it is. Every rank must call, with the same size."""
        assert device.type == "cpu", "ranks share the memory of the CPU"
        return self._arenas.zeros(numel, dtype)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: one copy of each peer's shard."""
        self.traffic.count("all_gather", output_N)
        slices = [own_slice(output_N, rank=peer, size=self.size) for peer in range(self.size)]

        def place_own() -> None:
            if slices[self.rank].data_ptr() != shard_S.data_ptr():
                slices[self.rank].copy_(shard_S)

        def move() -> None:
            for peer, theirs in self._theirs(shard_S):
                slices[peer].copy_(theirs)

        shard = shard_S.numel()
        held = [[(peer * shard, (peer + 1) * shard)] for peer in range(self.size)]
        move_pieces: Callable[[], None] = lambda: self._spread_pieces(output_N, held)  # noqa: E731
        return self._run("all_gather", label, shard_S, move, move_pieces, meanwhile=place_own)

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: each rank reads its slice of every buffer."""
        self.traffic.count("reduce_scatter", buffer_N)
        shard = own_slice(buffer_N, rank=0, size=self.size).numel()
        spans = [(peer * shard, (peer + 1) * shard) for peer in range(self.size)]
        return self.fold(buffer_N, spans, _sum_into(buffer_N, "sum"), collective="reduce_scatter", label=label)

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        """See `Collectives`: each rank reduces one slice and then reads the others'; all of it where that is little."""
        self.traffic.count("all_reduce", buffer_N)
        reduce = _sum_into(buffer_N, op)

        def move() -> None:
            spans = cut_spans(buffer_N.numel(), self.size)
            buffers = self._everyones(buffer_N)
            start, end = spans[self.rank]
            reduce(start, end, [each[start:end] for each in buffers])
            self._turnstile.meet()
            for peer, (start, end) in enumerate(spans):
                if peer != self.rank:
                    buffer_N[start:end].copy_(buffers[peer][start:end])

        def move_pieces() -> None:
            boxes = self._boxes(buffer_N.dtype)
            for start, end in cut_pieces(0, buffer_N.numel(), numel=boxes[0].numel()):
                boxes[self.rank][: end - start].copy_(buffer_N[start:end])
                self._turnstile.meet()
                reduce(start, end, [box[: end - start] for box in boxes])
                self._turnstile.meet()

        nbytes = buffer_N.numel() * buffer_N.element_size()
        return self._run(
            f"all_reduce {op}", label, buffer_N, move if nbytes > _SMALL_BYTES else move_pieces, move_pieces
        )

    def broadcast(self, buffer_N: Tensor, *, source: int, label: str = "") -> Pending:
        """See `Collectives`: every other rank copies the source's buffer."""
        self.traffic.count("broadcast", buffer_N)
        held: list[list[Span]] = [[(0, buffer_N.numel())] if peer == source else [] for peer in range(self.size)]
        return self.spread(buffer_N, held, collective=f"broadcast from {source}", label=label)

    def _exchange(self, output_M: Tensor, input_N: Tensor, parts: PartNumels, label: str) -> Pending:
        """Makes one copy of each part; see `CountedAllToAll`.

        Raises:
            ModelError: a rank does not send what this one expects; on every rank.
        """
        received = list(output_M.split(parts.receive))

        def numels() -> list[list[int]]:
            if parts.are_given:
                return self._agree_on_numels(parts.send, parts.receive)
            return [parts.send] * self.size

        def move() -> None:
            for peer, theirs in enumerate(numels()):
                _, _, _, place, offset = self._heard[peer]
                start = sum(theirs[: self.rank])
                whole = self._arenas.view(peer, place, offset, numel=sum(theirs), dtype=input_N.dtype)
                received[peer].copy_(whole[start : start + theirs[self.rank]])

        def move_pieces() -> None:
            largest = max(max(row) for row in numels())
            boxes = self._boxes(input_N.dtype)
            numel = boxes[0].numel() // self.size
            mine = input_N.split(parts.send)
            for start, end in cut_pieces(0, largest, numel=numel):
                for peer, part in enumerate(mine):
                    piece = part[start:end]
                    boxes[self.rank][peer * numel : peer * numel + piece.numel()].copy_(piece)
                self._turnstile.meet()
                for part, box in zip(received, boxes, strict=True):
                    piece = part[start:end]
                    piece.copy_(box[self.rank * numel : self.rank * numel + piece.numel()])
                self._turnstile.meet()

        return self._run("all_to_all", label, input_N, move, move_pieces, compare_bytes=not parts.are_given)

    def barrier(self) -> None:
        """See `Collectives`."""
        self.traffic.calls["barrier"] += 1
        self._run("barrier", "", torch.empty(0), lambda: None, lambda: None)

    def close(self) -> None:
        """See `Collectives`; the memory goes with its last tensor."""
        self._turnstile.close()
        self._arenas.close()
        self._drop_groups()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for the others so far; what it copies and adds up itself is no wait."""
        return self._turnstile.waited_s

    def settle(self, moved: _Moved) -> None:
        """Ends the last meeting of a collective, unless that has happened."""
        if self._moved is not moved:
            return
        self._moved = None
        if not self._turnstile.have_come():
            self._observer.enter(moved.name, WaitKind.THREAD)
            waited_before_s = self.waited_s
            self._turnstile.wait_for_all()
            self._observer.leave(self.waited_s - waited_before_s)

    def fold(
        self, buffer_N: Tensor, spans: Sequence[Span], fold: Fold, *, collective: str, label: str, piece_numel: int = 0
    ) -> Pending:
        """Gives each rank its span of the buffers of all ranks, see [Note: fold and spread].

        Args:
            buffer_N: flat, of one length on all ranks.
            spans: span of each rank, in rank order.
            fold: function called for each piece of this rank's span in ascending order; may write that piece of
                `buffer_N`, and reads the others only until it returns.
            collective: name of the collective that this fold is a part of.
            label: name of the data that is moved.
            piece_numel: elements of a piece, across whose end no call reaches; 0: whole spans where the buffers are
                shared.
        """
        mine = spans[self.rank]

        def move() -> None:
            everyone = self._everyones(buffer_N)
            for start, end in cut_pieces(*mine, numel=piece_numel or max(1, mine[1] - mine[0])):
                fold(start, end, [each[start:end] for each in everyone])

        def move_pieces() -> None:
            boxes = self._boxes(buffer_N.dtype)
            numel = boxes[0].numel() // self.size
            for pieces in _rounds([_nested(span, piece_numel or numel, numel) for span in spans]):
                for peer, (start, end) in pieces.items():
                    boxes[self.rank][peer * numel : peer * numel + end - start].copy_(buffer_N[start:end])
                self._turnstile.meet()
                if self.rank in pieces:
                    start, end = pieces[self.rank]
                    at = self.rank * numel
                    fold(start, end, [box[at : at + end - start] for box in boxes])
                self._turnstile.meet()

        return self._run(collective, label, buffer_N, move, move_pieces)

    def spread(self, buffer_N: Tensor, held: Sequence[Sequence[Span]], *, collective: str, label: str) -> Pending:
        """Fills this rank's buffer with the spans that other ranks hold, see [Note: fold and spread].

        Args:
            buffer_N: flat, of one length on all ranks.
            held: spans of the buffer that each rank has the values of, in rank order; no two spans overlap.
            collective: name of the collective that this spread is a part of.
            label: name of the data that is moved.
        """

        def move() -> None:
            for peer, theirs in self._theirs(buffer_N):
                for start, end in held[peer]:
                    buffer_N[start:end].copy_(theirs[start:end])

        return self._run(collective, label, buffer_N, move, lambda: self._spread_pieces(buffer_N, held))

    def _spread_pieces(self, buffer_N: Tensor, held: Sequence[Sequence[Span]]) -> None:
        boxes = self._boxes(buffer_N.dtype)
        numel = boxes[0].numel()
        for pieces in _rounds([[p for span in spans for p in cut_pieces(*span, numel=numel)] for spans in held]):
            if self.rank in pieces:
                start, end = pieces[self.rank]
                boxes[self.rank][: end - start].copy_(buffer_N[start:end])
            self._turnstile.meet()
            for peer, (start, end) in pieces.items():
                if peer != self.rank:
                    buffer_N[start:end].copy_(boxes[peer][: end - start])
            self._turnstile.meet()

    def _agree_on_numels(self, send: list[int], receive: list[int]) -> list[list[int]]:
        """Returns what each rank sends to each, by sender and receiver; two meetings."""
        boxes = [box[: self.size] for box in self._boxes(torch.int64)]
        boxes[self.rank].copy_(torch.tensor(send, dtype=torch.int64))
        boxes_of_receivers = [box[self.size : 2 * self.size] for box in self._boxes(torch.int64)]
        boxes_of_receivers[self.rank].copy_(torch.tensor(receive, dtype=torch.int64))
        self._turnstile.meet()
        table = [box.tolist() for box in boxes]
        expected = [box.tolist() for box in boxes_of_receivers]
        self._turnstile.meet()
        for sender, row in enumerate(table):
            for receiver, numel in enumerate(row):
                if expected[receiver][sender] != numel:
                    raise ModelError(
                        f"rank {self._ranks[sender]} sends {numel} elements to rank {self._ranks[receiver]}, which "
                        f"expects {expected[receiver][sender]}, in {self._turnstile.notice(self.rank)}",
                        hint="let the ranks exchange the lengths of the parts first",
                    )
        return table

    def _run(
        self,
        collective: str,
        label: str,
        buffer: Tensor,
        move: Callable[[], None],
        move_pieces: Callable[[], None],
        *,
        meanwhile: Callable[[], None] | None = None,
        compare_bytes: bool = True,
    ) -> Pending:
        """Runs one collective, see [Note: two meetings].

        Args:
            collective: name of the collective, the same on all ranks.
            label: name of the data that the collective moves, the same on all ranks.
            buffer: this rank's buffer, which the other ranks read or write.
            move: function that does the collective's work where the buffers of all ranks are shared.
            move_pieces: function that does the collective's work in pieces, through the mailbox.
            meanwhile: function for work that needs no other rank, run before this rank waits for the others; None for
                no such work.
            compare_bytes: the buffers of all ranks are of one size.
        """
        if self._moved is not None:
            self.settle(self._moved)
        name = wait_name(collective, label)
        self._observer.enter(name, WaitKind.THREAD)
        waited_before_s = self.waited_s
        place, offset = self._arenas.locate(buffer)
        nbytes = buffer.numel() * buffer.element_size()
        kind = crc32(name.encode())
        where = self._where
        text = f"{name}\n{where.oddity}" if where.oddity else name
        self._turnstile.say(
            kind, nbytes, place=place, offset=offset, step=where.step, micro_step=where.micro_step, text=text
        )
        self._turnstile.arrive()
        if meanwhile is not None:
            meanwhile()
        self._turnstile.wait_for_all()
        self._heard = [self._turnstile.heard(rank) for rank in range(self.size)]
        for rank, (their_kind, their_step, their_bytes, _, _) in enumerate(self._heard):
            if their_kind != kind or their_step != where.step or (compare_bytes and their_bytes != nbytes):
                self._refuse(rank)
        if all(their_place >= 0 for _, _, _, their_place, _ in self._heard):
            move()
            self._turnstile.arrive()
            self._moved = _Moved(self, name)
        else:
            # What the notices say has been read by all before the first of them can leave a new one.
            self._turnstile.meet()
            move_pieces()
        self._observer.leave(self.waited_s - waited_before_s)
        return _DONE if self._moved is None else self._moved

    def _refuse(self, rank: int) -> None:
        mine, theirs = self._turnstile.notice(self.rank), self._turnstile.notice(rank)
        raise ModelError(
            f"rank {self._ranks[self.rank]} is in {mine} while rank {self._ranks[rank]} is in {theirs}",
            hint="every rank must run the same model with the same config, and call it equally often; at stage 3 that "
            "holds for what reads or writes a parameter outside of its forward too, also to print it; of blocks that "
            "ranks choose for themselves see `dsrun config explain zero_optimization.leaf_module`",
        )

    def _everyones(self, buffer: Tensor) -> list[Tensor]:
        """Returns every rank's buffer in rank order, where all of them are shared."""
        return [
            self._arenas.view(rank, place, offset, numel=buffer.numel(), dtype=buffer.dtype)
            for rank, (_, _, _, place, offset) in enumerate(self._heard)
        ]

    def _theirs(self, buffer: Tensor) -> list[tuple[int, Tensor]]:
        """Returns the other ranks' buffers."""
        return [(rank, theirs) for rank, theirs in enumerate(self._everyones(buffer)) if rank != self.rank]

    def _boxes(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns the mailboxes of all ranks."""
        return [box.view(dtype) for box in self._arenas.mailboxes]


def _sum_into(buffer_N: Tensor, op: str) -> Fold:
    return lambda start, end, terms: reduce_in_order(terms, buffer_N[start:end], op)


def _nested(span: Span, outer_numel: int, inner_numel: int) -> list[Span]:
    """Cuts a span into pieces of one length, and those into pieces of another."""
    return [inner for outer in cut_pieces(*span, numel=outer_numel) for inner in cut_pieces(*outer, numel=inner_numel)]


def _rounds(pieces: Sequence[Sequence[Span]]) -> Iterator[dict[int, Span]]:
    """Yields, as often as any rank has pieces, the next one of each rank that has one left."""
    for number in range(max(len(each) for each in pieces)):
        yield {rank: each[number] for rank, each in enumerate(pieces) if number < len(each)}
