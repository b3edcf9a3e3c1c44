"""The messages of an axis with one rank: there is nobody to send to, so each is a mistake of the caller."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..collectives import Pending, Traffic
from .links import Incoming, Lane


class AlonePointToPoint:
    """See `PointToPoint`."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def send(self, tensors: Sequence[Tensor], *, to: int, lane: Lane, header: bytes = b"", label: str = "") -> Pending:
        """See `PointToPoint`: never called."""
        raise AssertionError(f"{label or 'a message'} sent to rank {to} of an axis that has one rank")

    def receive(self, *, source: int, lane: Lane, label: str = "") -> Incoming:
        """See `PointToPoint`: never called."""
        raise AssertionError(f"{label or 'a message'} expected from rank {source} of an axis that has one rank")

    def close(self) -> None:
        """See `PointToPoint`: there is nothing to let go of."""
