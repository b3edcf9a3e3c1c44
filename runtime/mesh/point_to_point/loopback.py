"""Messages among threads of one process, the ranks of a `LoopbackWorld`. For tests, on the CPU and on one GPU.

A message is a copy that the sender gives away, so neither side sees what the other writes later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import Done, Pending
from ..loopback import LoopbackCollectives
from .in_order import OrderedLinks, Take
from .links import Lane, Message
from .packing import packing_of

_DONE = Done()


@dataclass(frozen=True, slots=True)
class _Posted:
    """A message, and the point of the sender's stream from which on its tensors are there; None on the CPU."""

    message: Message
    copied: torch.cuda.Event | None


class LoopbackPointToPoint(OrderedLinks):
    """One rank of a `LoopbackWorld`; see `PointToPoint`.

    Args:
        collectives: this rank's collectives along the axis.
        ranks: numbers in the job of the axis's ranks, for errors; None: those along the axis.
    """

    def __init__(self, collectives: LoopbackCollectives, ranks: Sequence[int] | None = None) -> None:
        self._world = collectives.world
        rank = collectives.rank
        super().__init__(
            rank,
            range(collectives.size) if ranks is None else ranks,
            self._world.observers[rank],
            where=self._world.places[rank],
        )

    def close(self) -> None:
        """See `PointToPoint`: there is nothing to let go of."""

    def _send(self, tensors: Sequence[Tensor], to: int, lane: Lane, header: bytes, label: str) -> Pending:
        device = tensors[0].device if tensors else torch.device("cpu")
        packing_of(tensors, device_type=device.type, label=label)
        copies = tuple(each.detach().clone(memory_format=torch.contiguous_format) for each in tensors)
        copied = None
        if device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        self._world.messages.put((self.rank, to, lane), _Posted(Message(header, copies), copied))
        return _DONE

    def _ask(self, source: int, lane: Lane, label: str) -> Take:
        def take() -> Message:
            began_s = time.perf_counter()
            posted = self._world.messages.take((source, self.rank, lane))
            if posted is None:
                waited_s = time.perf_counter() - began_s
                raise self._missing(source, lane, label, waited_s=waited_s, reason="", last="")
            assert isinstance(posted, _Posted)
            if posted.copied is not None:
                for tensor in posted.message.tensors:
                    stream = torch.cuda.current_stream(tensor.device)
                    stream.wait_event(posted.copied)
                    # It was allocated for the sender's stream.
                    tensor.record_stream(stream)
            return posted.message

        return take
