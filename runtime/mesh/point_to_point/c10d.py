"""Messages by torch.distributed: Gloo between hosts, and NCCL.

[Note: parts of a message] A message is a *head* of fixed length, the *rest* of the head where it is longer, and the
*body*: all tensors in one run of bytes, left out where there are none. The head says how long the rest is and carries
as much of it as fits. Forms that are those of the message before on this lane to this rank travel as a mark. Head and
rest go over Gloo as CPU memory, under NCCL too, in a group handed in for it. The three have tags of their own for each
lane, so the receiver can post the next head before it knows the body of the message in front.

[Note: sends that wait for nobody] Gloo and NCCL hold a send until the receiver asks for it. So a message is copied,
the copy goes on its way, and the tensors are the caller's again at once. The copy is kept until the receiver has taken
the message: Gloo's sends know nothing of their end until somebody waits for them, and then wait for the receiver. So
each head says how many messages its sender has taken of the other's so far. Where messages go one way only, the
receiver leaves the number in the store now and then, and a sender with many unanswered messages looks there. Under NCCL
the tensors' own work must have ended as well, for the device reads the copy later than the host has given it away.

[Note: groups under NCCL] A communicator does one thing after the other on a stream of its own. With both directions on
one, two ranks that both send first would wait for each other on their devices. So each lane has a group for messages to
higher ranks and another one for those to lower ranks: chains of waits along one of them end at its last rank. torch
makes the communicator of two ranks when they first use it, and waits for both in that; so neighbours along the axis, a
ring, first meet here in one order. Others meet in their first message. This module has not been run under NCCL.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.errors import ModelError

from ...compat import PrefixStore, store_of
from ..collectives import Done, Pending, WaitObserver
from ..host_memory.collectives import exchange_over
from ..last_positions import Whereabouts
from ..step_position import Where
from .in_order import OrderedLinks, Take
from .links import Lane, Message
from .packing import fill, packing_from, packing_of, places_in, unpack

#: Number of the message, length of the forms' text (-1: the same as before), length of the header, and how many
#: messages of the other's were taken on each lane.
_HEAD = struct.Struct("=qqqqq")
_HEAD_BYTES = 256
_LANES = list(Lane)
_TAGS_OF_A_LANE = 3
_FIRST_TAG = 7_300
#: Messages after which their receiver leaves word in the store, and after which their sender looks there.
_UNTOLD = 32
_MOST_UNANSWERED = 64
#: Longest wait, at the end, for those who are to take messages.
_LINGER_S = 3.0
_CPU = torch.device("cpu")
_DONE = Done()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaneGroups:
    """The process groups of one lane.

    Attributes:
        up: group for messages to higher ranks.
        down: group for messages to lower ranks; under Gloo the same one serves.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def between(self, source: int, to: int) -> dist.ProcessGroup:
        """Returns the group of the messages from one rank to another."""
        return self.up if source < to else self.down


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message on its way.

    Attributes:
        number: number of the message on its lane to its receiver, from 1 on.
        works: torch's handles; those of the head first.
        body: the handle of the tensors; None where there are none.
        buffers: memory that is sent.
    """

    number: int
    works: list[dist.Work]
    body: dist.Work | None
    buffers: list[Tensor]


@dataclass(slots=True)
class _Outgoing:
    """A lane to one rank.

    Attributes:
        sent: number of messages that were sent.
        answered: number of messages that the receiver is known to have taken.
        text: description of the tensors of the last message.
        under_way: messages that may not have been taken.
    """

    sent: int = 0
    answered: int = 0
    text: bytes | None = None
    under_way: deque[_Sent] = field(default_factory=deque[_Sent])


@dataclass(slots=True)
class _Arriving:
    """A lane from one rank.

    Attributes:
        taken: number of messages that were taken.
        told: number of messages that the sender was told to have been taken.
        text: description of the tensors of the last message.
    """

    taken: int = 0
    told: int = 0
    text: bytes = b""


class C10dPointToPoint(OrderedLinks):
    """See the module; every rank of the axis must make one.

    Args:
        groups: process groups of the axis's ranks, by lane.
        observer: observer that is told of this rank's waits; None for no observer.
        heads: group for heads, over Gloo; None: the groups of the lanes, which are Gloo's.
        where: the step this rank is in, for errors.
        device: device of the tensors.
    """

    def __init__(
        self,
        groups: Mapping[Lane, LaneGroups],
        observer: WaitObserver | None = None,
        *,
        heads: dist.ProcessGroup | None = None,
        where: Where | None = None,
        device: torch.device = _CPU,
    ) -> None:
        first = groups[Lane.ACTIVATIONS].up
        super().__init__(first.rank(), dist.get_process_group_ranks(first), observer, where=where)
        assert heads is not None or device.type == "cpu", "heads are CPU memory"
        self._groups = dict(groups)
        self._heads = heads
        self._device = device
        self._store = store_of(first)
        # Groups outlast meshes, and so do their stores: what an earlier mesh's ranks left there is not these links'.
        marks = exchange_over(first if heads is None else heads)([int.from_bytes(os.urandom(4), "little")])
        self._answers = PrefixStore(f"dsrun links/{'-'.join(str(mark) for (mark,) in marks)}", self._store)
        self._outgoing: dict[tuple[int, Lane], _Outgoing] = {}
        self._arriving: dict[tuple[int, Lane], _Arriving] = {}
        for lane in Lane:
            for rank in range(self.size):
                self._outgoing[rank, lane], self._arriving[rank, lane] = _Outgoing(), _Arriving()
        if device.type != "cpu":
            self._meet_neighbours()

    @property
    def unanswered(self) -> int:
        """Messages whose copies this rank keeps."""
        return sum(len(line.under_way) for line in self._outgoing.values())

    @property
    def is_idle(self) -> bool:
        """Whether every message that was asked for has been taken."""
        return not any(self._asked.values())

    def close(self) -> None:
        """See `PointToPoint`; tells the others, and lets go of the groups, whose threads end with the last reference.

        Messages that were sent and not taken yet go with the groups, so it waits a little for those who are to take
        them; not on the way out of an error.
        """
        if not self._groups:
            return
        if sys.exc_info()[0] is None:
            self._linger()
        Whereabouts(self._store, self._ranks, self.rank).leave_word(f"has left the job{self._where}")
        self._groups = {}
        self._heads = None
        self._outgoing, self._arriving = {}, {}

    def _send(self, tensors: Sequence[Tensor], to: int, lane: Lane, header: bytes, label: str) -> Pending:
        packing = packing_of(tensors, device_type=self._device.type, label=label)
        line = self._outgoing[to, lane]
        self._forget_answered(to, lane)
        line.sent += 1
        is_known = packing.text == line.text
        line.text = packing.text
        head, rest = self._head(line.sent, b"" if is_known else packing.text, header, to, is_known=is_known)
        buffers = [head] if rest is None else [head, rest]
        heads = self._heads_between(self.rank, to, lane)
        try:
            works = [
                _begun(dist.isend(part, group=heads, group_dst=to, tag=_tag(lane, number)))
                for number, part in enumerate(buffers)
            ]
            body = None
            if packing.nbytes:
                copy = torch.empty(packing.nbytes, dtype=torch.uint8, device=self._device)
                fill(places_in(packing, copy.untyped_storage(), device=self._device), tensors)
                group = self._groups[lane].between(self.rank, to)
                body = _begun(dist.isend(copy, group=group, group_dst=to, tag=_tag(lane, 2)))
                buffers.append(copy)
        except (dist.DistError, RuntimeError) as error:
            raise self._failure(
                f"send{f' of {label}' if label else ''} to rank {self._ranks[to]}", lane, error
            ) from error
        line.under_way.append(_Sent(line.sent, works, body, buffers))
        return _DONE

    def _head(
        self, number: int, text: bytes, header: bytes, to: int, *, is_known: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the head of a message and its rest, see [Note: parts of a message]."""
        arriving = [self._arriving[to, lane] for lane in _LANES]
        for each in arriving:
            each.told = each.taken
        taken = [each.taken for each in arriving]
        data = _HEAD.pack(number, -1 if is_known else len(text), len(header), *taken) + text + header
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        head[: len(data)].copy_(torch.frombuffer(bytearray(data[:_HEAD_BYTES]), dtype=torch.uint8))
        if len(data) <= _HEAD_BYTES:
            return head, None
        return head, torch.frombuffer(bytearray(data[_HEAD_BYTES:]), dtype=torch.uint8)

    def _ask(self, source: int, lane: Lane, label: str) -> Take:
        # The head is asked for at once, so that it is here by the time it is waited for.
        memory = bytearray(_HEAD_BYTES)
        head = torch.frombuffer(memory, dtype=torch.uint8)
        posted = self._post(head, source, lane, label, part=0)

        def take() -> Message:
            began_s = time.monotonic()
            line = self._arriving[source, lane]
            try:
                posted.wait()
                data = bytes(memory)
                number, text_bytes, header_bytes, *taken = _HEAD.unpack_from(data)
                assert number == line.taken + 1, f"message {number} came after {line.taken}"
                length = _HEAD.size + max(0, text_bytes) + header_bytes
                if length > _HEAD_BYTES:
                    rest = bytearray(length - _HEAD_BYTES)
                    buffer = torch.frombuffer(rest, dtype=torch.uint8)
                    self._post(buffer, source, lane, label, part=1).wait()
                    data += rest
                text_end = _HEAD.size + max(0, text_bytes)
                if text_bytes >= 0:
                    line.text = data[_HEAD.size : text_end]
                packing = packing_from(line.text)
                body = torch.empty(packing.nbytes, dtype=torch.uint8, device=self._device)
                if packing.nbytes:
                    # Under NCCL, from here on the current stream waits and not this thread.
                    self._post(body, source, lane, label, part=2).wait()
            except ModelError:
                raise  # said already; it is a RuntimeError too
            except (dist.DistError, RuntimeError) as error:
                waited_s = time.monotonic() - began_s
                raise self._lost(source, lane, label, waited_s, error) from error
            line.taken += 1
            self._hear(source, taken)
            self._tell(source, lane, line)
            tensors = unpack(packing, body.untyped_storage(), device=self._device)
            return Message(data[text_end : text_end + header_bytes], tensors)

        return take

    def _post(self, buffer: Tensor, source: int, lane: Lane, label: str, *, part: int) -> dist.Work:
        """Begins to receive a part of a message: 0 the head, 1 its rest, 2 the tensors."""
        is_body = part == 2
        group = (
            self._groups[lane].between(source, self.rank) if is_body else self._heads_between(source, self.rank, lane)
        )
        try:
            return _begun(dist.irecv(buffer, group=group, group_src=source, tag=_tag(lane, part)))
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(source, lane, label, 0.0, error) from error

    def _heads_between(self, source: int, to: int, lane: Lane) -> dist.ProcessGroup:
        return self._groups[lane].between(source, to) if self._heads is None else self._heads

    def _hear(self, rank: int, taken: Sequence[int]) -> None:
        """Notes how many messages a rank has taken on each lane, and lets go of them."""
        for lane, number in zip(_LANES, taken, strict=True):
            line = self._outgoing[rank, lane]
            line.answered = max(line.answered, number)
            self._let_go(line)

    def _tell(self, source: int, lane: Lane, line: _Arriving) -> None:
        """Leaves word of what was taken where no message has said so for long."""
        if line.taken - line.told >= _UNTOLD:
            line.told = line.taken
            self._answers.set(self._answer_key(source, self.rank, lane), str(line.taken))

    def _forget_answered(self, to: int, lane: Lane) -> None:
        """Looks for word of a receiver that has said nothing for long; waits for nobody."""
        line = self._outgoing[to, lane]
        if line.sent - line.answered >= _MOST_UNANSWERED and line.sent % _UNTOLD == 0:
            key = self._answer_key(self.rank, to, lane)
            if self._answers.check([key]):
                line.answered = max(line.answered, int(self._answers.get(key)))
        self._let_go(line)

    @staticmethod
    def _let_go(line: _Outgoing) -> None:
        """Lets go of messages that were taken, see [Note: sends that wait for nobody]."""
        while line.under_way and line.under_way[0].number <= line.answered:
            first = line.under_way[0]
            if first.body is not None and first.buffers[-1].is_cuda and not first.body.is_completed():
                return
            for work in first.works:
                work.wait()
            if first.body is not None and not first.buffers[-1].is_cuda:
                first.body.wait()
            line.under_way.popleft()

    @staticmethod
    def _answer_key(source: int, to: int, lane: Lane) -> str:
        return f"{source}/{to}/{lane.value}"

    def _linger(self) -> None:
        """Waits a little for messages that were not taken; warns of the first that still is not."""
        deadline_s = time.monotonic() + _LINGER_S
        for (rank, lane), line in self._outgoing.items():
            self._let_go(line)
            for sent in line.under_way:
                on_cpu = [*sent.works] if sent.body is None or self._device.type != "cpu" else [*sent.works, sent.body]
                try:
                    for work in on_cpu:
                        work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
                except (dist.DistError, RuntimeError) as error:
                    _log.warning(
                        "rank %s ends while rank %s has not taken a message on the lane of %s%s: %s",
                        self._ranks[self.rank],
                        self._ranks[rank],
                        lane.value,
                        self._where,
                        error,
                    )
                    return

    def _meet_neighbours(self) -> None:
        """Has neighbours make their communicators, see [Note: groups under NCCL]."""
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        pairs = sorted({(min(pair), max(pair)) for r in range(self.size) for pair in [(r, (r + 1) % self.size)]})
        for low, high in pairs:
            if self.rank not in (low, high):
                continue
            for lane in _LANES:
                for source, to in ((low, high), (high, low)):
                    group = self._groups[lane].between(source, to)
                    if self.rank == source:
                        _begun(dist.isend(token, group=group, group_dst=to)).wait()
                    else:
                        _begun(dist.irecv(token, group=group, group_src=source)).wait()

    def _lost(self, source: int, lane: Lane, label: str, waited_s: float, error: Exception) -> ModelError:
        """Returns the error of a message that does not come, with where the others are."""
        words = Whereabouts(self._store, self._ranks, self.rank)
        words.leave_word(f"waited in {self._wait_name(source, label)}{self._where}")
        last = f"{words.ask()} ({error})"
        return self._missing(source, lane, label, waited_s=waited_s, reason="", last=last)

    def _failure(self, name: str, lane: Lane, error: Exception) -> ModelError:
        """Returns the error of a send that torch refuses: a connection that has failed before."""
        words = Whereabouts(self._store, self._ranks, self.rank)
        words.leave_word(f"was in {name}{self._where}")
        return ModelError(
            f"rank {self._ranks[self.rank]} ({self.rank} of {self.size} along its axis) failed in {name} on the lane "
            f"of {lane.value}{self._where}: {words.ask()} ({error})",
            hint="the log of a rank that has ended says why",
        )


def _tag(lane: Lane, part: int) -> int:
    return _FIRST_TAG + _LANES.index(lane) * _TAGS_OF_A_LANE + part


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
