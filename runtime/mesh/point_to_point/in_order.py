"""The calls of `PointToPoint` that are alike however messages move: checks, counts, order, and words to observers.

Moves nothing: how a message is sent and taken is left to those that derive from `OrderedLinks`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from dsrun.errors import ModelError

from ..collectives import NoObserver, Pending, Traffic, WaitKind, WaitObserver
from ..step_position import Where
from .links import Incoming, Lane, Message
from .packing import bytes_of

#: Takes the next message of a rank from a lane.
Take = Callable[[], Message]


class _Asked:
    """A message that was asked for, and those before it."""

    def __init__(self, before: deque[_Asked], take: Take) -> None:
        self._before = before
        self._take = take
        self._message: Message | None = None
        self._is_given = False
        before.append(self)

    def wait(self) -> Message:
        """Returns the message, after all that were asked for before it have been taken; once."""
        assert not self._is_given, "the message has been waited for before"
        while self._message is None:
            first = self._before.popleft()
            first._message = first._take()
        # Kept nowhere but by the caller, whose last reference frees its memory.
        message, self._message, self._is_given = self._message, None, True
        return message


class OrderedLinks(ABC):
    """Messages along one axis; see `PointToPoint`.

    Args:
        rank: this rank's number along the axis.
        ranks: numbers in the job of the axis's ranks, in the order of the axis.
        observer: observer that is told of this rank's waits; None for no observer.
        where: the step this rank is in, for errors; None where there are no steps.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], observer: WaitObserver | None = None, *, where: Where | None = None
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.traffic = Traffic()
        self._ranks = tuple(ranks)
        self._observer = NoObserver() if observer is None else observer
        self._where = Where() if where is None else where
        self._asked: dict[tuple[int, Lane], deque[_Asked]] = {}

    def send(self, tensors: Sequence[Tensor], *, to: int, lane: Lane, header: bytes = b"", label: str = "") -> Pending:
        """See `PointToPoint`."""
        self._check_rank(to)
        self.traffic.calls["send"] += 1
        self.traffic.bytes["send"] += bytes_of(tensors)
        return self._send(tensors, to, lane, header, label)

    def receive(self, *, source: int, lane: Lane, label: str = "") -> Incoming:
        """See `PointToPoint`."""
        self._check_rank(source)
        take = self._ask(source, lane, label)

        def take_and_tell() -> Message:
            self._observer.enter(self._wait_name(source, label), WaitKind.THREAD)
            began_s = time.perf_counter()
            message = take()  # after an error the name stays with the observer
            self._observer.leave(time.perf_counter() - began_s)
            self.traffic.calls["receive"] += 1
            self.traffic.bytes["receive"] += bytes_of(message.tensors)
            return message

        asked = self._asked.get((source, lane))
        if asked is None:
            asked = self._asked[source, lane] = deque()
        return _Asked(asked, take_and_tell)

    @abstractmethod
    def close(self) -> None:
        """See `PointToPoint`."""

    @abstractmethod
    def _send(self, tensors: Sequence[Tensor], to: int, lane: Lane, header: bytes, label: str) -> Pending:
        """Sends a message; arguments as in `send`."""

    @abstractmethod
    def _ask(self, source: int, lane: Lane, label: str) -> Take:
        """Prepares for the next message of a rank on a lane; arguments as in `receive`.

        Returns:
            function that waits for the message and takes it; called in the order in which messages were asked for.
        """

    def _wait_name(self, source: int, label: str) -> str:
        """Returns how a wait is called, see [Note: named waits]; the rank by its number in the job."""
        return f"receive{f' of {label}' if label else ''} from rank {self._ranks[source]}"

    def _missing(self, source: int, lane: Lane, label: str, *, waited_s: float, reason: str, last: str) -> ModelError:
        """Returns the error of a message that does not come.

        Args:
            source: rank that does not send it.
            lane: lane of the message.
            label: name of the message.
            waited_s: seconds that this rank has waited.
            reason: clause on the end of the source, as `has ended`; empty where it only stays away.
            last: further words on the source, a clause; empty for none.
        """
        gone = f", which {reason}" if reason else ""
        return ModelError(
            f"rank {self._ranks[self.rank]} ({self.rank} of {self.size} along its axis) waited {waited_s:.3g} s in "
            f"{self._wait_name(source, label)} ({source} along the axis){gone}, on the lane of {lane.value}"
            f"{self._where}{'; ' if last else ''}{last}",
            hint=f"if rank {self._ranks[source]} has ended, its log says why; if it has not, it is stuck elsewhere, or "
            "has other batches: all ranks of the axis must run the same schedule over equally many",
        )

    def _check_rank(self, rank: int) -> None:
        assert 0 <= rank < self.size, f"rank {rank} on an axis of {self.size}"
        assert rank != self.rank, f"a message of rank {rank} to itself"
