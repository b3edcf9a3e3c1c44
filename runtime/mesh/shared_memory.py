"""Collectives of CPU ranks on one host, through memory that all of them see: no copy that the result does not need.

Buffers made by `zeros` lie in shared segments: peers read them where they are. Others go through a mailbox in pieces.
Sums are made in rank order, in fp32 for the 16-bit formats, so they have the same bits on every rank and in every run.

[Note: two meetings] A collective begins with a meeting, after which every rank's data may be read, and ends with one,
after which every rank's data may be overwritten. So each is over when the call returns; on a CPU, where the copying
takes the same cores as the computing, there is nothing to overlap with. A rank whose peers are in another collective
says so and raises: mixed up, they would mix their data.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.errors import ModelError

from ..compat import all_gather_single
from .collectives import C10dCollectives, Done, Pending, WaitObserver, own_slice, wait_name
from .segments import share_memory
from .turnstile import Turnstile, turnstile_bytes

#: What a rank copies at once where its data is not shared: two of them fit into a core's cache.
_MAILBOX_BYTES = 1 << 20
#: Below this a rank adds up a whole buffer by itself, which saves a meeting.
_SMALL_BYTES = 1 << 16
#: Elements added up at once in fp32 where there are more than two ranks: the sum stays in the cache.
_SUM_NUMEL = 1 << 16
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
#: Of an arena; a page that nobody has written takes no memory. Each takes a descriptor a rank.
_ARENA_BYTES = 1 << 30
#: Buffers begin at a cache line.
_ALIGNMENT_BYTES = 64
_DONE = Done()

_log = logging.getLogger(__name__)


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
        group: the axis; its ranks share a host, see `segments.share_one_host`. Used to set up, not to move data.
        observer: hears of waits.
        timeout_s: longest wait for the other ranks.

    Raises:
        OSError: no memory can be shared; on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, observer: WaitObserver | None = None, *, timeout_s: float) -> None:
        super().__init__(group, observer)
        self._exchange = exchange_over(group)
        processes = [process for (process,) in self._exchange([os.getpid()])]
        places = share_memory(turnstile_bytes(self.size), self._exchange)
        self._turnstile = Turnstile(places, rank=self.rank, processes=processes, timeout_s=timeout_s)
        #: This rank's own segments, and the bytes of every rank's, by segment.
        self._arenas: list[mmap.mmap] = []
        self._segments: list[list[Tensor]] = []
        self._bases: list[int] = []
        self._order: list[int] = []
        #: Bytes of the newest segment that are given away.
        self._used_bytes = 0
        self._mailboxes = self._share(_MAILBOX_BYTES)
        self._used_bytes = _MAILBOX_BYTES
        # Nobody may come to the turnstile before all have made theirs.
        self._exchange([1])

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives`: memory that the peers read where it is. Every rank must call, with the same size."""
        assert device.type == "cpu", "ranks share the memory of the CPU"
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(0, dtype=dtype)
        if self._used_bytes + nbytes > self._segments[-1][self.rank].numel():
            try:
                self._share(max(nbytes, _ARENA_BYTES))
            except OSError as error:
                _log.warning("%s bytes cannot be shared (%s): they are moved in pieces", nbytes, error)
                return torch.zeros(numel, dtype=dtype)
            self._used_bytes = 0
        segment = self._arenas[-1]
        start = self._used_bytes
        self._used_bytes = -(-(start + nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # Of its own bytes alone, so that what a tensor holds is what it seems to hold.
        return torch.frombuffer(segment, dtype=dtype, count=numel, offset=start)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, of: str = "") -> Pending:
        """See `Collectives`: one copy of each peer's shard."""
        self.traffic.count("all_gather", output_N)

        mine = own_slice(output_N, rank=self.rank, size=self.size)
        if mine.data_ptr() != shard_S.data_ptr():
            mine.copy_(shard_S)

        def move() -> None:
            for peer, theirs in self._whole(shard_S):
                own_slice(output_N, rank=peer, size=self.size).copy_(theirs)

        def move_pieces() -> None:
            for start, end in _pieces(shard_S, _MAILBOX_BYTES):
                for peer, theirs in self._post(shard_S[start:end]):
                    own_slice(output_N, rank=peer, size=self.size)[start:end].copy_(theirs)
                self._turnstile.meet()

        return self._run("all_gather", of, shard_S, move, move_pieces)

    def reduce_scatter(self, buffer_N: Tensor, *, of: str = "") -> Pending:
        """See `Collectives`: each rank reads its slice of every buffer."""
        self.traffic.count("reduce_scatter", buffer_N)
        mine = own_slice(buffer_N, rank=self.rank, size=self.size)

        def move() -> None:
            theirs = [own_slice(each, rank=self.rank, size=self.size) for _, each in self._all(buffer_N)]
            _reduce(theirs, mine, "sum")

        def move_pieces() -> None:
            for start, end in _pieces(mine, _MAILBOX_BYTES // self.size):
                posted = [own_slice(buffer_N, rank=peer, size=self.size)[start:end] for peer in range(self.size)]
                theirs = [own_slice(each, rank=self.rank, size=self.size) for _, each in self._post_all(*posted)]
                _reduce(theirs, mine[start:end], "sum")
                self._turnstile.meet()

        return self._run("reduce_scatter", of, buffer_N, move, move_pieces)

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", of: str = "") -> Pending:
        """See `Collectives`: each rank reduces one slice and then reads the others'; all of it where that is little."""
        self.traffic.count("all_reduce", buffer_N)
        nbytes = buffer_N.numel() * buffer_N.element_size()

        def move() -> None:
            buffers = [each for _, each in self._all(buffer_N)]
            spans = _spans(buffer_N.numel(), self.size)
            start, end = spans[self.rank]
            _reduce([each[start:end] for each in buffers], buffer_N[start:end], op)
            self._turnstile.meet()
            for peer, (start, end) in enumerate(spans):
                if peer != self.rank:
                    buffer_N[start:end].copy_(buffers[peer][start:end])

        def move_pieces() -> None:
            for start, end in _pieces(buffer_N, _MAILBOX_BYTES):
                _reduce([each for _, each in self._post_all(buffer_N[start:end])], buffer_N[start:end], op)
                self._turnstile.meet()

        return self._run(f"all_reduce {op}", of, buffer_N, move if nbytes > _SMALL_BYTES else move_pieces, move_pieces)

    def broadcast(self, buffer_N: Tensor, *, source: int, of: str = "") -> Pending:
        """See `Collectives`: every other rank copies the source's buffer."""
        self.traffic.count("broadcast", buffer_N)

        def move() -> None:
            for peer, theirs in self._whole(buffer_N):
                if peer == source:
                    buffer_N.copy_(theirs)

        def move_pieces() -> None:
            for start, end in _pieces(buffer_N, _MAILBOX_BYTES):
                piece = buffer_N[start:end]
                for peer, theirs in self._post(piece):
                    if peer == source:
                        piece.copy_(theirs)
                self._turnstile.meet()

        return self._run(f"broadcast from {source}", of, buffer_N, move, move_pieces)

    def barrier(self) -> None:
        """See `Collectives`."""
        self.traffic.calls["barrier"] += 1
        self._run("barrier", "", torch.empty(0), lambda: None, lambda: None)

    def close(self) -> None:
        """See `Collectives`; the memory goes with its last tensor."""
        self._turnstile.close()
        self._arenas, self._segments, self._bases, self._order = [], [], [], []
        self._mailboxes = []
        super().close()

    def _run(
        self, collective: str, of: str, buffer: Tensor, move: Callable[[], None], move_pieces: Callable[[], None]
    ) -> Pending:
        """Runs one collective, see [Note: two meetings]; `move` where the buffers of all ranks are shared."""
        name = wait_name(collective, of)
        self._observer.enter(name)
        started_s = time.perf_counter()
        place, offset = self._locate(buffer)
        nbytes = buffer.numel() * buffer.element_size()
        kind = crc32(name.encode())
        self._turnstile.say(kind, nbytes, place=place, offset=offset, text=f"{name} ({nbytes} bytes)")
        self._turnstile.meet()
        self._heard = [self._turnstile.heard(rank) for rank in range(self.size)]
        for rank, (their_kind, their_bytes, _, _) in enumerate(self._heard):
            if their_kind != kind or their_bytes != nbytes:
                self._refuse(rank)
        if all(their_place >= 0 for _, _, their_place, _ in self._heard):
            move()
            self._turnstile.meet()
        else:
            # What the notices say has been read by all before the first of them can leave a new one.
            self._turnstile.meet()
            move_pieces()
        self._observer.leave(time.perf_counter() - started_s)
        return _DONE

    def _refuse(self, rank: int) -> None:
        raise ModelError(
            f"rank {self.rank} is in {self._turnstile.notice(self.rank).text} "
            f"while rank {rank} is in {self._turnstile.notice(rank).text}",
            hint="every rank must run the same model with the same config, and call it equally often; "
            "of blocks that ranks choose for themselves see `dsrun config explain zero_optimization.leaf_module`",
        )

    def _share(self, nbytes: int) -> list[Tensor]:
        """Makes a segment a rank; returns the bytes of all, in rank order."""
        arenas = share_memory(nbytes, self._exchange)
        self._arenas.append(arenas[self.rank])
        segments = [torch.frombuffer(arena, dtype=torch.uint8) for arena in arenas]
        base = segments[self.rank].data_ptr()
        at = bisect_right(self._bases, base)
        self._bases.insert(at, base)
        self._order.insert(at, len(self._segments))
        self._segments.append(segments)
        return segments

    def _locate(self, buffer: Tensor) -> tuple[int, int]:
        """Returns number and offset of the shared segment in which a buffer lies; -1 where it lies in none."""
        address = buffer.data_ptr()
        at = bisect_right(self._bases, address) - 1
        if at < 0 or not buffer.is_contiguous():
            return -1, 0
        number = self._order[at]
        offset = address - self._bases[at]
        nbytes = buffer.numel() * buffer.element_size()
        return (number, offset) if offset + nbytes <= self._segments[number][self.rank].numel() else (-1, 0)

    def _all(self, buffer: Tensor) -> list[tuple[int, Tensor]]:
        """Returns every rank's buffer in rank order, where all of them are shared."""
        nbytes = buffer.numel() * buffer.element_size()
        return [
            (rank, self._segments[place][rank][offset : offset + nbytes].view(buffer.dtype))
            for rank, (_, _, place, offset) in enumerate(self._heard)
        ]

    def _whole(self, buffer: Tensor) -> list[tuple[int, Tensor]]:
        """Returns the other ranks' buffers."""
        return [(rank, theirs) for rank, theirs in self._all(buffer) if rank != self.rank]

    def _post_all(self, *pieces: Tensor) -> list[tuple[int, Tensor]]:
        """Puts pieces of one length into this rank's mailbox; returns what all ranks put there, in rank order."""
        numel, dtype = pieces[0].numel(), pieces[0].dtype
        nbytes = len(pieces) * numel * dtype.itemsize
        boxes = [box[:nbytes].view(dtype) for box in self._mailboxes]
        for number, piece in enumerate(pieces):
            boxes[self.rank][number * numel : (number + 1) * numel].copy_(piece)
        self._turnstile.meet()
        return list(enumerate(boxes))

    def _post(self, piece: Tensor) -> list[tuple[int, Tensor]]:
        """The same without this rank's own."""
        return [(rank, theirs) for rank, theirs in self._post_all(piece) if rank != self.rank]


def _pieces(flat: Tensor, piece_bytes: int) -> list[tuple[int, int]]:
    """Returns where the pieces of a flat tensor begin and end, in elements."""
    step = max(1, piece_bytes // flat.element_size())
    return [(start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)]


def _spans(numel: int, size: int) -> list[tuple[int, int]]:
    """Cuts a buffer of any length into `size` spans, almost equal, at multiples of 16 elements."""
    step = -(-numel // (16 * size)) * 16
    return [(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(size)]


def _reduce(terms: Sequence[Tensor], out: Tensor, op: str) -> None:
    """Reduces `terms` in their order into `out`, which may be one of them."""
    if len(terms) == 1:
        if out.data_ptr() != terms[0].data_ptr():
            out.copy_(terms[0])
    elif len(terms) == 2:
        # torch adds 16-bit numbers in fp32 and rounds once, as below.
        (torch.maximum if op == "max" else torch.add)(terms[0], terms[1], out=out)
    elif op == "max":
        out.copy_(torch.stack(list(terms)).amax(0))
    else:
        wide = _WIDE.get(out.dtype, out.dtype)
        for start in range(0, out.numel(), _SUM_NUMEL):
            end = min(start + _SUM_NUMEL, out.numel())
            total = terms[0][start:end].to(wide, copy=True)
            for term in terms[1:]:
                total.add_(term[start:end])
            out[start:end].copy_(total)
