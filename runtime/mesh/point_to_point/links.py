"""Messages between neighbours along an axis: the protocol that its callers own. Who implements it stands beside it.

[Note: messages in order]
A message goes from one rank to another on one of two lanes. Messages of one pair of ranks and one lane arrive in the
order in which they were sent, and are received in that order; nothing else has an order. A send never waits for the
receiver: whoever sends may send again before anything was received. Activations go on one lane and gradients on the
other, so that neither stands behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from ..collectives import Pending, Traffic


class Lane(Enum):
    """Which of the two orders a message is in."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class Message:
    """What has come.

    Attributes:
        header: bytes that the sender has given with it.
        tensors: tensors in the sender's order, with its shapes and dtypes; contiguous, on this rank's device. They
            are the receiver's to keep and to overwrite for as long as it refers to them: their memory is used again
            only when nothing does.
    """

    header: bytes
    tensors: tuple[Tensor, ...]


class Incoming(Protocol):
    """A message that was asked for."""

    def wait(self) -> Message:
        """Returns the message; on CUDA, work enqueued on the current stream from now on may read it."""
        ...


class PointToPoint(Protocol):
    """What the runtime asks of messages along one axis; `label` names what is moved, see [Note: named waits].

    See [Note: messages in order]. Ranks are numbered along the axis. Calls and bytes are counted as `send` and
    `receive`, by the tensors' bytes.
    """

    rank: int
    size: int
    traffic: Traffic

    def send(self, tensors: Sequence[Tensor], *, to: int, lane: Lane, header: bytes = b"", label: str = "") -> Pending:
        """Sends a message; any number of tensors of any shapes and dtypes, none included.

        Args:
            tensors: tensors to send, which may be strided; left alone until the handle has been waited for.
            to: rank that receives it; another one than this.
            lane: lane that the message goes on.
            header: bytes that say what the message is, of any length.
            label: name of the data that is moved, shown to observers of the wait.

        Returns:
            handle whose `wait` returns when the tensors may be overwritten.
        """
        ...

    def receive(self, *, source: int, lane: Lane, label: str = "") -> Incoming:
        """Asks for the next message of a rank on a lane, without waiting.

        Args:
            source: rank that sends it; another one than this.
            lane: lane that the message comes on.
            label: name of the data that is moved, shown to observers of the wait.
        """
        ...

    def close(self) -> None:
        """Ends the use of these messages; none may follow."""
        ...
