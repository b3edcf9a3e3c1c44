"""What a rank's seconds go to, by the phases that it tells the launcher. Compares no ranks.

[Note: seconds of a phase] A phase lasts until the next one begins. On a CPU the clock on the wall says how long. On
CUDA the host runs ahead of the device, so an event is recorded on the current stream where a phase begins, and what
lies between two events counts: the device's own time, with what it waits for the host. Nobody waits for the events:
they are read at the end of a step, where the host has just read the gradient norm behind them. The update that follows
that read is not over then, and counts in the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

#: Phases of `dsrun.contract.step_records.PHASES` by the first word of what ranks tell; others are the script's.
_PHASE_OF = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "weight": "backward",
    "step": "step",
    "save": "save",
    "copy": "save",
    "evaluate": "evaluate",
}
#: Marks that may be unread: more than a step of a long pipeline has. Before there are more, as in a long evaluation,
#: those that the device has come to are read; where that is none, further phases are not told apart.
_MOST_MARKS = 4096


class Mark(Protocol):
    """A point of a stream that knows its time; a `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Marks the point that the current stream has come to."""
        ...

    def query(self) -> bool:
        """Returns whether the device has come to it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds up to a later mark; the device has come to both."""
        ...


class PhaseTimes:
    """Seconds of one rank by phase, see [Note: seconds of a phase].

    Args:
        make_mark: Function that makes a mark of the device's stream; None: the clock says the time.
        is_capturing: Function that says whether the current stream is captured into a graph, where nothing is marked.
        clock: Seconds, by a clock that does not go back.
    """

    def __init__(
        self,
        make_mark: Callable[[], Mark] | None = None,
        *,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make_mark = make_mark
        self._is_capturing = is_capturing
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._phase = "script"
        self._begun_s = clock()
        self._marks: deque[tuple[str, Mark]] = deque()
        self._spare: list[Mark] = []

    def enter(self, said: str) -> None:
        """Another phase begins.

        Args:
            said: Word of the rank for it, see `HeartbeatWriter.beat`.
        """
        phase = _PHASE_OF.get(said.partition(" ")[0], "script")
        if phase == self._phase:
            return
        if self._make_mark is None:
            self._count_until_now()
        elif self._is_capturing() or not self._has_room():
            return
        else:
            self._mark(phase)
        self._phase = phase

    def take_step(self) -> dict[str, float]:
        """Returns the seconds by phase since the last call, as far as they are known."""
        if self._make_mark is None:
            self._count_until_now()
        else:
            self._read()
            if not self._marks:
                self._mark(self._phase)
        taken, self._seconds = self._seconds, {}
        return taken

    def _has_room(self) -> bool:
        """Returns whether one more mark may be unread; counts the phases that have ended, without waiting for any."""
        if len(self._marks) >= _MOST_MARKS:
            self._read()
        return len(self._marks) < _MOST_MARKS

    def _count_until_now(self) -> None:
        now_s = self._clock()
        self._add(self._phase, now_s - self._begun_s)
        self._begun_s = now_s

    def _mark(self, phase: str) -> None:
        assert self._make_mark is not None, "the clock needs no marks"
        mark = self._spare.pop() if self._spare else self._make_mark()
        mark.record()
        self._marks.append((phase, mark))

    def _read(self) -> None:
        """Counts the phases that have ended on the device."""
        while len(self._marks) > 1 and self._marks[1][1].query():
            phase, begin = self._marks.popleft()
            self._add(phase, begin.elapsed_time(self._marks[0][1]) / 1000)
            self._spare.append(begin)

    def _add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds


def phase_times_of(device: torch.device) -> PhaseTimes:
    """Returns the clock of phases for a device's work."""
    return PhaseTimes(_cuda_event) if device.type == "cuda" else PhaseTimes()


def _cuda_event() -> Mark:
    return torch.cuda.Event(enable_timing=True)
