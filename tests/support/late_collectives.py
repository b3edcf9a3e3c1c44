"""Collectives among threads that end as late as they may: NCCL's `wait` and nothing more, without NCCL.

`LoopbackWorld` answers each call with its result, and its threads share a stream: no forgotten `wait` can show there.

[Note: as late as allowed] What `runtime/mesh/collectives.py` promises of a call's memory, and what happens to it here:

- Results may be used after `wait`. Until then what the call will write holds bytes of ones (NaN in every floating
  dtype, -1 in whole numbers), and each rank's result is written when that rank waits.
- What the call reads is to be left alone until then. On the CPU a rank that has changed it, or has written to what the
  call overwrites, gets a `RaceError` from `wait`. On CUDA the call reads late, so a change goes into the result.
- `reduce_scatter` leaves "the rest undefined": it stays NaN.
- Nobody may leave out a `wait`: `unwaited` names the collectives for which a rank has not waited (yet).

On CUDA a rank has a compute stream of its own, and another beside it for its collectives. That one waits for what the
compute stream has been given when a call starts, sleeps, and works; `wait` makes the current stream wait for it by an
event, and stops the host only until all ranks have *started* the call, for NCCL needs them all too. Nothing else orders
anything. The engine's backward runs in the thread that calls it: autograd's own thread, one a device in all of a
process, would wait in one rank's hook for what another rank's hook is to start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsrun.errors import ModelError
from dsrun.runtime.mesh.collectives import PartNumels, Pending, WaitKind, WaitObserver, own_slice, wait_name
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.sums import reduce_in_order

_Result = TypeVar("_Result")

CPU = torch.device("cpu")
#: Some 2 ms of a GPU: more than the host needs to enqueue the next few kernels.
CYCLES = 4_000_000
_POISON = 0xFF


class RaceError(AssertionError):
    """Memory of a collective was written between its start and its `wait`."""


@dataclass(frozen=True, slots=True)
class _Post:
    """What one rank gives to a collective.

    Attributes:
        name: name of the collective, and the step that the rank is in.
        sent: copy of the tensor that the collective reads, with the values that it had when it was read.
        ready: event after which that tensor has been read; None on the CPU.
        numels: lengths of the parts that each rank gets, of an `all_to_all`.
    """

    name: str
    sent: Tensor
    ready: Any
    numels: Sequence[int]


@dataclass(slots=True)
class _Meeting:
    """One collective: what ranks that started it gave, and how many have not waited for it."""

    unread: int
    posts: dict[int, _Post] = field(default_factory=dict[int, _Post])


class LateWorld(LoopbackWorld):
    """`size` ranks as threads, see [Note: as late as allowed]; a world of one rank is its calling thread.

    Args:
        size: ranks.
        device: device on which the ranks compute.
        timeout_s: a rank that waits longer for the others raises `threading.BrokenBarrierError`.
        cycles: cycles of the GPU's clock that each collective sleeps.
        observers: one a rank, who hear of its waits.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device = CPU,
        timeout_s: float = 30.0,
        cycles: int = CYCLES,
        observers: Sequence[WaitObserver] | None = None,
    ) -> None:
        super().__init__(size, timeout_s=timeout_s, observers=observers)
        self.device = device
        self.cycles = cycles
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._started = [0] * size
        self._meetings: dict[int, _Meeting] = {}
        self._under_way: dict[tuple[int, int], str] = {}
        self._is_over = False

    @property
    def unwaited(self) -> list[str]:
        """Names of the collectives for which a rank that has started them has not waited, in no order."""
        with self._changed:
            return list(self._under_way.values())

    def run(self, body: Callable[[LoopbackCollectives], _Result]) -> list[_Result]:
        """See `LoopbackWorld`."""
        if self.size == 1:
            return [body(LateCollectives(self, 0))]

        def late(plain: LoopbackCollectives) -> _Result:
            with ExitStack() as stack:
                if self.device.type == "cuda":
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
                try:
                    return body(LateCollectives(self, plain.rank))
                except BaseException:
                    with self._changed:
                        self._is_over = True
                        self._changed.notify_all()
                    raise

        return super().run(late)

    def post(self, rank: int, name: str, post: _Post) -> int:
        """A rank starts its next collective; returns the collective's number."""
        with self._changed:
            number = self._started[rank]
            self._started[rank] += 1
            self._meetings.setdefault(number, _Meeting(self.size)).posts[rank] = post
            self._under_way[rank, number] = name
            self._changed.notify_all()
            return number

    def meet(self, rank: int, number: int) -> list[_Post]:
        """Returns what all ranks gave, in rank order, once each has started the collective.

        Raises:
            ModelError: another rank has started another collective in its place, or in another step.
        """
        with self._changed:
            meeting = self._meetings[number]
            all_there = self._changed.wait_for(
                lambda: self._is_over or len(meeting.posts) == self.size, self._timeout_s
            )
            if not all_there or len(meeting.posts) < self.size:
                raise threading.BrokenBarrierError
            del self._under_way[rank, number]
            meeting.unread -= 1
            if not meeting.unread:
                del self._meetings[number]
            posts = [meeting.posts[other] for other in range(self.size)]
        for other, post in enumerate(posts):
            if post.name != posts[rank].name:
                raise ModelError(f"rank {rank} is in {posts[rank].name} while rank {other} is in {post.name}")
        return posts

    def hand_out(self, rank: int, name: str, pending: Pending) -> Pending:
        """Returns what a rank gets for a collective: `pending`. Tests that plant faults give it something else."""
        del rank, name
        return pending


class LateCollectives(LoopbackCollectives):
    """One rank of a `LateWorld`."""

    def __init__(self, world: LateWorld, rank: int) -> None:
        super().__init__(world, rank)
        self._late = world
        self._beside = _Beside(world.device, world.cycles) if world.device.type == "cuda" else None

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_gather", output_N)
        own = own_slice(output_N, rank=self.rank, size=self.size)
        in_place = own.data_ptr() == shard_S.data_ptr()
        slices = output_N.split(own.numel()) if own.numel() else ()
        written = [part for rank, part in enumerate(slices) if not (in_place and rank == self.rank)]

        def finish(posts: Sequence[_Post]) -> None:
            for rank, (part, post) in enumerate(zip(slices, posts, strict=True) if slices else ()):
                if not (in_place and rank == self.rank):
                    part.copy_(post.sent)

        return self._start(wait_name("all_gather", label), reads=shard_S, writes=written, finish=finish)

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("reduce_scatter", buffer_N)
        own = own_slice(buffer_N, rank=self.rank, size=self.size)

        def finish(posts: Sequence[_Post]) -> None:
            own.copy_(own_slice(_summed(posts, "sum"), rank=self.rank, size=self.size))

        return self._start(wait_name("reduce_scatter", label), reads=buffer_N, writes=[buffer_N], finish=finish)

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_reduce", buffer_N)

        def finish(posts: Sequence[_Post]) -> None:
            buffer_N.copy_(_summed(posts, op))

        return self._start(wait_name(f"all_reduce {op}", label), reads=buffer_N, writes=[buffer_N], finish=finish)

    def broadcast(self, buffer_N: Tensor, *, source: int, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("broadcast", buffer_N)
        written = [] if self.rank == source else [buffer_N]

        def finish(posts: Sequence[_Post]) -> None:
            for part in written:
                part.copy_(posts[source].sent)

        return self._start(wait_name(f"broadcast from {source}", label), reads=buffer_N, writes=written, finish=finish)

    def _exchange(self, output_M: Tensor, input_N: Tensor, parts: PartNumels, label: str) -> Pending:

        def finish(posts: Sequence[_Post]) -> None:
            for part, post in zip(output_M.split(parts.receive), posts, strict=True):
                part.copy_(post.sent.split(list(post.numels))[self.rank])

        name = wait_name("all_to_all", label)
        return self._start(name, reads=input_N, writes=[output_M], finish=finish, numels=parts.send)

    @contextmanager
    def reading(self, label: str) -> Generator[None]:
        """See `Collectives`."""
        if self._beside is None:
            yield
            return
        observer = self._late.observers[self.rank]
        observer.enter(f"results of {label}", WaitKind.READ)
        begun_s = time.perf_counter()
        yield
        observer.leave(time.perf_counter() - begun_s)

    def _start(
        self,
        name: str,
        *,
        reads: Tensor,
        writes: Sequence[Tensor],
        finish: Callable[[Sequence[_Post]], None],
        numels: Sequence[int] = (),
    ) -> Pending:
        """Starts a collective, see [Note: as late as allowed].

        Args:
            name: name of the collective.
            reads: tensor that this rank gives to the collective.
            writes: tensors that the collective overwrites: memory apart from `reads`, or `reads` itself.
            finish: function that writes the result, from what all ranks gave.
            numels: lengths of the parts that each rank gets, of an `all_to_all`; see `_Post`.
        """
        beside = self._beside if reads.is_cuda else None
        in_place = any(part.data_ptr() == reads.data_ptr() for part in writes)
        with nullcontext() if beside is None else beside.behind_current():
            sent = reads.clone() if in_place else None
            for part in writes:
                _poison(part)
            if sent is None:
                if beside is not None:
                    beside.sleep()
                sent = reads.clone()
            ready = None if beside is None else beside.record()
        number = self._late.post(self.rank, name, _Post(f"{name}{self.where}", sent, ready, numels))
        unchanged = None if in_place else (reads, sent)
        pending = _Late(self._late, self.rank, number, name, beside, list(writes), unchanged, finish)
        return self._late.hand_out(self.rank, name, pending)


class _Late:
    """A collective that a rank has started; it is finished when the rank waits for it."""

    def __init__(
        self,
        world: LateWorld,
        rank: int,
        number: int,
        name: str,
        beside: _Beside | None,
        written: Sequence[Tensor],
        unchanged: tuple[Tensor, Tensor] | None,
        finish: Callable[[Sequence[_Post]], None],
    ) -> None:
        self._world = world
        self._rank = rank
        self._number = number
        self._name = name
        self._beside = beside
        self._written = written
        self._unchanged = unchanged  # on CUDA nobody compares it, but it is still to be read
        self._finish: Callable[[Sequence[_Post]], None] | None = finish
        self._end: Any = None

    def wait(self) -> None:
        """See `Pending`."""
        observer = self._world.observers[self._rank]
        observer.enter(self._name, WaitKind.THREAD if self._beside is None else WaitKind.STREAM)
        begun_s = time.perf_counter()
        self._wait()
        observer.leave(time.perf_counter() - begun_s)

    def _wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            posts = self._world.meet(self._rank, self._number)
            if self._beside is None:
                self._check()
                finish(posts)
            else:
                with self._beside.behind([post.ready for post in posts]):
                    for post in posts:
                        post.sent.record_stream(torch.cuda.current_stream(self._world.device))
                    self._beside.sleep()
                    finish(posts)
                    self._end = self._beside.record()
        if self._beside is not None:
            torch.cuda.current_stream(self._world.device).wait_event(self._end)
            self._unchanged = None

    def _check(self) -> None:
        if not all(_is_poison(part) for part in self._written):
            raise RaceError(f"rank {self._rank}: what {self._name} overwrites was written before it was waited for")
        if self._unchanged is not None and not torch.equal(*map(_bytes, self._unchanged)):
            raise RaceError(f"rank {self._rank}: what {self._name} reads was written before it was waited for")


class _Beside:
    """A rank's stream for collectives, beside the one it computes on."""

    def __init__(self, device: torch.device, cycles: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._cycles = cycles

    def behind_current(self) -> AbstractContextManager[None]:
        """What is enqueued inside runs here, behind what the current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._inside()

    def behind(self, events: Sequence[Any]) -> AbstractContextManager[None]:
        """What is enqueued inside runs here, behind these events."""
        for event in events:
            self._stream.wait_event(event)
        return self._inside()

    def sleep(self) -> None:
        """Lets the stream do nothing for a while."""
        torch.cuda._sleep(self._cycles)

    def record(self) -> Any:
        """Returns an event behind all that was enqueued here."""
        return self._stream.record_event()

    @contextmanager
    def _inside(self) -> Generator[None]:
        with torch.cuda.stream(self._stream):
            yield


def _summed(posts: Sequence[_Post], op: str) -> Tensor:
    result = torch.empty_like(posts[0].sent)
    reduce_in_order([post.sent for post in posts], result, op)
    return result


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _poison(tensor: Tensor) -> None:
    _bytes(tensor).fill_(_POISON)


def _is_poison(tensor: Tensor) -> bool:
    return bool((_bytes(tensor) == _POISON).all())
