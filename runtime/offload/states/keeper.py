"""What a step in host memory asks of masters and states that are not always there. Made in `offload/disk/states.py`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StateKeeper(Protocol):
    """Has masters and states that are not always in memory: in a step, while they are brought; else all of them."""

    def begin(self) -> None:
        """A step begins; not from the thread that steps, as `end` is not."""
        ...

    def expect(self, index: int) -> None:
        """A range will be wanted soon."""
        ...

    def bring(self, index: int) -> None:
        """Returns when a range's masters and states are there, until `put_away`.

        Raises:
            OffloadError: they cannot be read, or are not what was written.
        """
        ...

    def put_away(self, index: int) -> None:
        """A range has been stepped."""
        ...

    def end(self) -> None:
        """Returns when all ranges may be read and set, until `begin`.

        Raises:
            OffloadError: a range could not be written.
        """
        ...

    def buffers(self) -> list[Tensor]:
        """Returns the memory that ranges come into."""
        ...

    def close(self) -> None:
        """No step will follow."""
        ...
