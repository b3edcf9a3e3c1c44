"""Mail among threads of one process, for tests of who sends what to whom."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from torch import Tensor

from dsrun.runtime.mesh.join.mail import Parcel

_PATIENCE_S = 60.0


class PostOffice:
    """Letters on their way, by who sends them to whom."""

    def __init__(self, size: int) -> None:
        pairs = [(sender, receiver) for sender in range(size) for receiver in range(size)]
        self.ways: dict[tuple[int, int], queue.Queue[Tensor]] = {pair: queue.Queue() for pair in pairs}


class LoopbackMail:
    """A rank's; see `Mail`."""

    def __init__(self, office: PostOffice, rank: int) -> None:
        self._office = office
        self._rank = rank
        self.sent_bytes = 0

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """See `Mail`."""
        for parcel in sends:
            self.sent_bytes += parcel.data.numel()
            self._office.ways[self._rank, parcel.rank].put(parcel.data.clone())
        for parcel in receives:
            parcel.data.copy_(self._office.ways[parcel.rank, self._rank].get(timeout=_PATIENCE_S))

    def close(self) -> None:
        """See `Mail`."""
