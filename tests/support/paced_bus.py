"""What holds a bus to a pace; for tests, and for measurements of what copies hide."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyPace:
    """The pace of a link of so many bytes a second, which carries one copy after the other.

    Args:
        bytes_per_s: bytes per second of the link, in one direction.
        clock: seconds now.
        sleep: function that waits for a number of seconds.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = clock()

    def __call__(self, nbytes: int) -> None:
        """Returns when the link has carried `nbytes` more."""
        self._free_at_s = max(self._clock(), self._free_at_s) + nbytes / self._bytes_per_s
        rest_s = self._free_at_s - self._clock()
        if rest_s > 0:
            self._sleep(rest_s)
