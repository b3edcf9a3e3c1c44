"""How long a rank has waited for others, by collective and data: the one clock of waits, for all of a rank's axes.

Counts, and tells the heartbeat. Does not compare ranks (`observe/wait_report.py`) and judges nobody (the launcher).

[Note: seconds of a wait] Where `wait` blocks the thread, the collectives say how long this rank has waited for others;
what it does itself meanwhile, where they know of it, is no wait. On CUDA it blocks the current stream: an event is
recorded on it before `wait` and one behind, and what lies between them is how long the stream stood still for that
collective, next to nothing if it had ended before. Nobody waits for the events. They are read where the host has just
read from the device anyway (`reading`), and before there are too many, as far as they have ended by then; the rest is
read the next time. The seconds of that read itself are the device's own work, and no wait for others: a rank's own time
is the time on the wall less the seconds counted here. Nothing is recorded while the stream is captured into a CUDA
graph, so waits inside of a graph are not seen.

[Note: waits between stages] What a pipeline has its ranks wait shows in messages, and where a step ends: ranks of all
stages agree on the norm there, and who has had its last backward early waits for the others. So waits for messages and
in collectives of several stages' ranks are counted once more, all together. Those of one stage's ranks are not: their
stage waits for nobody else meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .collectives import WaitKind, WaitObserver

_log = logging.getLogger(__name__)

#: Waits of a stream that may be unread: more than a micro step of some hundred units has. Before there are more, those
#: that have ended are read; if none has, the host is that far ahead of the device, and further ones are not timed.
MOST_UNREAD = 4096
#: Between two words to the heartbeat on what this rank waits in longest: some steps, or one that takes longer.
_TELL_S = 2.0


class Heartbeat(Protocol):
    """Who is told of waits as they come; `HeartbeatWriter` is one."""

    def enter(self, collective: str) -> None:
        """This rank waits in a collective from now on."""
        ...

    def leave(self, waited_s: float) -> None:
        """The wait is over; so many seconds more have been waited for others."""
        ...

    def tell_longest_wait(self, collective: str, waited_s: float, step_s: float) -> None:
        """Of late this rank has waited longest in `collective`; seconds a step, of so many that a step takes."""
        ...

    def tell_stage_wait(self, waited_s: float) -> None:
        """Of late this rank has waited so many seconds a step for ranks of other pipeline stages."""
        ...


class TimingEvent(Protocol):
    """A point of a stream that knows its time; a `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Marks the point that the current stream has come to."""
        ...

    def query(self) -> bool:
        """Returns whether the device has come to it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds up to a later event; the device has come to both."""
        ...


class WaitTag(Protocol):
    """Who wants the seconds of single waits; see `WaitTimes.tag`."""

    def add_wait(self, seconds: float) -> None:
        """A wait that was begun while this was the tag has taken so long; maybe told much later."""
        ...


_MICRO = " of micro batch "


@dataclass(slots=True)
class Waited:
    """Waits in one collective.

    Attributes:
        calls: Number of waits.
        seconds: Seconds of all of them together.
    """

    calls: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one more wait."""
        self.calls += 1
        self.seconds += seconds


def of_micro(micro: int) -> str:
    """Returns how a label names a micro batch: shown while a rank waits, and left out where waits are counted."""
    return f"{_MICRO}{micro}"


def without_micro(name: str) -> str:
    """Returns a name without its micro batch."""
    before, found, rest = name.partition(_MICRO)
    return before + rest.lstrip("0123456789") if found else name


def waited_since(now: Mapping[str, Waited], earlier: Mapping[str, Waited]) -> dict[str, Waited]:
    """Returns the waits between two snapshots, without collectives that had none."""
    none = Waited()
    between: dict[str, Waited] = {}
    for name, waited in now.items():
        before = earlier.get(name, none)
        if waited.calls > before.calls:
            between[name] = Waited(waited.calls - before.calls, waited.seconds - before.seconds)
    return between


@dataclass(frozen=True, slots=True)
class _Unread:
    name: str
    is_between_stages: bool
    begin: TimingEvent
    end: TimingEvent
    tag: WaitTag | None


@dataclass(frozen=True, slots=True)
class _Mark:
    time_s: float
    step: int
    times: dict[str, Waited]
    between_stages_s: float


class WaitTimes:
    """The waits of one rank, see [Note: seconds of a wait]; a `WaitObserver` of all its axes.

    Args:
        heartbeat: Receiver of each wait, and of the longest one.
        make_event: Function that makes an event for the device's streams.
        is_capturing: Function that says whether the current stream is captured into a graph.
        clock: Seconds, by a clock that does not go back.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        make_event: Callable[[], TimingEvent] | None = None,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: Who is told; between two waits another may take its place.
        self.heartbeat = heartbeat
        #: Who is told the seconds of waits that begin from now on, beside the counts; None for nobody.
        self.tag: WaitTag | None = None
        self._tag: WaitTag | None = None
        self._make_event = _cuda_event if make_event is None else make_event
        self._is_capturing = is_capturing
        self._clock = clock
        self._times: dict[str, Waited] = {}
        self._name = ""
        self._kind = WaitKind.THREAD
        self._is_between_stages = False
        self._between_stages_s = 0.0
        self._total_s = 0.0
        self._begin: TimingEvent | None = None
        self._unread: deque[_Unread] = deque()
        self._spare: list[TimingEvent] = []
        self._unreported_s = 0.0  # read in the middle of a step, for the heartbeat
        self._tells_untimed = False
        self._steps = 0
        self._told: _Mark | None = None

    @property
    def unread(self) -> int:
        """Waits of streams whose seconds are not known yet."""
        return len(self._unread)

    @property
    def total_s(self) -> float:
        """Seconds of all waits so far that are known."""
        return self._total_s

    @property
    def between_stages_s(self) -> float:
        """Seconds of these for ranks of other pipeline stages."""
        return self._between_stages_s

    def snapshot(self) -> dict[str, Waited]:
        """Returns the waits so far by the name of the collective; the numbers stand still."""
        return {name: Waited(each.calls, each.seconds) for name, each in self._times.items()}

    def between_stages(self) -> WaitObserver:
        """Returns the observer of waits for ranks of other pipeline stages, see [Note: waits between stages]."""
        return _BetweenStages(self)

    def enter(self, collective: str, kind: WaitKind, *, is_between_stages: bool = False) -> None:
        """See `WaitObserver`.

        Args:
            collective: name of the collective.
            kind: kind of the wait.
            is_between_stages: whether ranks of other pipeline stages are waited for.
        """
        self.heartbeat.enter(collective)
        self._name, self._kind, self._is_between_stages = collective, kind, is_between_stages
        self._tag = self.tag
        if kind is WaitKind.STREAM:
            self._begin = None if self._is_capturing() or not self._has_room() else self._record()

    def leave(self, waited_s: float) -> None:
        """See `WaitObserver`."""
        if self._kind is WaitKind.THREAD:
            self._count(self._name, waited_s, is_between_stages=self._is_between_stages, tag=self._tag)
        elif self._kind is WaitKind.READ:
            waited_s, self._unreported_s = self._unreported_s + self._read(), 0.0
        else:
            waited_s = 0.0
            if self._begin is not None:
                self._unread.append(
                    _Unread(self._name, self._is_between_stages, self._begin, self._record(), self._tag)
                )
                self._begin = None
        self.heartbeat.leave(waited_s)

    def end_step(self) -> None:
        """An optimizer step is over. Now and then the heartbeat is told the longest wait of the last ones."""
        self._steps += 1
        now_s, told = self._clock(), self._told
        if told is not None and now_s - told.time_s < _TELL_S:
            return
        self._told = _Mark(now_s, self._steps, self.snapshot(), self._between_stages_s)
        # The first step waits for whatever building and compiling took: no step is like it.
        if told is None:
            return
        steps = self._steps - told.step
        between = waited_since(self._told.times, told.times)
        longest = max(between, key=lambda name: between[name].seconds, default="")
        seconds = between[longest].seconds if longest else 0.0
        self.heartbeat.tell_longest_wait(longest, seconds / steps, (now_s - told.time_s) / steps)
        self.heartbeat.tell_stage_wait((self._between_stages_s - told.between_stages_s) / steps)

    def _count(self, name: str, seconds: float, *, is_between_stages: bool, tag: WaitTag | None) -> None:
        self._of(name).add(seconds)
        self._total_s += seconds
        if tag is not None:
            tag.add_wait(seconds)
        if is_between_stages:
            self._between_stages_s += seconds

    def _of(self, name: str) -> Waited:
        waited = self._times.get(name)
        if waited is None:
            counted = without_micro(name)
            waited = self._times.get(counted)
            if waited is None:
                waited = self._times[counted] = Waited()
        return waited

    def _has_room(self) -> bool:
        """Returns whether one more wait may be unread; reads those that have ended, without waiting for any."""
        if len(self._unread) < MOST_UNREAD:
            return True
        if self._unread[0].end.query():
            self._unreported_s += self._read()
        if len(self._unread) < MOST_UNREAD:
            return True
        if not self._tells_untimed:
            self._tells_untimed = True
            _log.warning("%d waits for other ranks are under way on the device: more are not timed", MOST_UNREAD)
        return False

    def _record(self) -> TimingEvent:
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        return event

    def _read(self) -> float:
        """Counts the waits that have ended on the device, and returns their seconds."""
        seconds = 0.0
        for _ in range(len(self._unread)):
            each = self._unread.popleft()
            if not each.end.query():
                # Another stream's, which the read has not waited for.
                self._unread.append(each)
                continue
            waited_s = each.begin.elapsed_time(each.end) / 1000
            self._count(each.name, waited_s, is_between_stages=each.is_between_stages, tag=each.tag)
            self._spare += (each.begin, each.end)
            seconds += waited_s
        return seconds


class _BetweenStages:
    """See `WaitTimes.between_stages`."""

    def __init__(self, waits: WaitTimes) -> None:
        self._waits = waits

    def enter(self, collective: str, kind: WaitKind) -> None:
        """See `WaitObserver`."""
        self._waits.enter(collective, kind, is_between_stages=True)

    def leave(self, waited_s: float) -> None:
        """See `WaitObserver`."""
        self._waits.leave(waited_s)


def _cuda_event() -> TimingEvent:
    return torch.cuda.Event(enable_timing=True)
