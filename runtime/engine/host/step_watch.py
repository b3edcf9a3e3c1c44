"""What steps with an optimizer in host memory took, seen from outside: seconds, of them waited, and on the host.

Keeps sums and nothing else; who asks for them decides what follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from ...offload.step.ways import BlockStep, RangeWork

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """Means of some steps, in seconds.

    Attributes:
        steps: number of steps observed.
        seconds: mean seconds of a step, from the start of one update to the start of the next.
        waited: mean seconds of a step spent in waiting for the update; a part of `seconds`.
        stepping: mean seconds a step that the processor spends on updating ranges, beside everything else.
    """

    steps: int
    seconds: float
    waited: float
    stepping: float


class TimedSteps:
    """A `BlockStep` that counts the seconds of another.

    Args:
        steps: the other.
        clock: seconds now.

    Attributes:
        seconds: seconds spent in steps so far.
    """

    def __init__(self, steps: BlockStep, *, clock: Clock = time.perf_counter) -> None:
        self._steps = steps
        self._clock = clock
        self.seconds = 0.0

    def step(self, work: RangeWork) -> None:
        """See `BlockStep`."""
        started = self._clock()
        self._steps.step(work)
        self.seconds += self._clock() - started


class StepWatch:
    """Watches updates from the first one's beginning on; its own time is that of a few clock reads a step.

    Args:
        timed: `BlockStep` that counts the seconds of the processor.
        clock: seconds now.
    """

    def __init__(self, timed: TimedSteps, *, clock: Clock = time.perf_counter) -> None:
        self._timed = timed
        self._clock = clock
        self._begun = 0
        self._waits = 0
        self._waited_s = 0.0
        #: When an update began: the time, what had been waited, and the processor's seconds.
        self._first = self._last = (0.0, 0.0, 0.0)

    def begins(self) -> None:
        """An update begins."""
        self._last = (self._clock(), self._waited_s, self._timed.seconds)
        if not self._begun:  # what was before made states, and warmed caches up
            self._first = self._last
        self._begun += 1

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Counts the time that is spent inside as waited; one wait inside of another counts once."""
        started = self._clock()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._waited_s += self._clock() - started

    @property
    def steps(self) -> int:
        """Steps that have been seen whole: between the beginnings of updates."""
        return max(0, self._begun - 1)

    def observed(self) -> ObservedSteps:
        """Returns the means; at least one step has been seen."""
        count = self.steps
        assert count, "no step has been seen whole"
        seconds, waited, stepping = (
            (last - first) / count for first, last in zip(self._first, self._last, strict=True)
        )
        return ObservedSteps(count, seconds, waited, stepping)
