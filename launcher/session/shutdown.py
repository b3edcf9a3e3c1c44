"""How an attempt is brought to its end: asked, forced, left. Starts nothing, and judges no failure.

[Note: escalation] A stop is asked, then forced, then left: the first request sends the signal to all ranks with the
plan's grace, the second kills them now, the third returns at once and leaves the kill to the agents, whose
lifelines end. The first failure asks as well, so one request of the user after it forces.

[Note: one end told twice] A scheduler that ends a job signals ranks and front end at once, and the news that a rank
died of it may be here before the signal itself. That is one request, not a failure and a request after it.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Sequence

from dsrun.units import format_duration

from ..failures.causes.recognise import signal_name
from ..plan.launch_plan import LaunchPlan
from ..protocol import Kill, Stop
from .agent_link import Link
from .rank_table import RankTable
from .sink import Sink
from .user_requests import StopRequest

#: Beyond the grace: for an agent to kill, to give up on what cannot be killed, and to send the rest of the output.
_END_MARGIN_S = 40.0


class _Step(enum.Enum):
    """See [Note: escalation]."""

    RUNNING = enum.auto()
    ASKED = enum.auto()
    FORCED = enum.auto()
    LEFT = enum.auto()


class Shutdown:
    """The one way down, entered at any step and never walked back. See [Note: escalation].

    Args:
        plan: the launch.
        links: every host.
        table: table of the known facts about the ranks, which is told when and why they were stopped.
        sink: receiver of notes and events.
        cancelled: callback that gets the link of a host that had not begun, and never will.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        links: Sequence[Link],
        table: RankTable,
        sink: Sink,
        *,
        cancelled: Callable[[Link], None],
    ) -> None:
        self._grace_s = plan.grace_s
        self._links = links
        self._table = table
        self._sink = sink
        self._cancelled = cancelled
        self._step = _Step.RUNNING

    @property
    def has_begun(self) -> bool:
        """The ranks were asked to end."""
        return self._step is not _Step.RUNNING

    @property
    def is_left(self) -> bool:
        """The user wants to wait no longer."""
        return self._step is _Step.LEFT

    def after_failure(self, failure: str, *, silent: bool = False, which: str = "other") -> None:
        """Asks the ranks that still run to end, unless that was done.

        Args:
            failure: words for what ended the attempt.
            silent: no note is needed.
            which: word that a note puts before `ranks` for those that are stopped; empty for none.
        """
        if self.has_begun:
            return
        running = self._table.running_ranks()
        if running and not silent:
            self._sink.note(f"{failure}; stopping {count_ranks(running, which)} (grace {self._grace})")
        self._ask(signal.SIGTERM, reason=failure)

    def on_request(self, request: StopRequest) -> None:
        """Goes one step further, as the user asks. See [Note: one end told twice]."""
        is_first = self._table.user_stop is None
        self._table.user_stop = self._table.user_stop or request.stop
        if is_first and not request.at_once and self._step is _Step.ASKED and self._table.has_died_of(request.stop):
            self._sink.note(f"{request.reason}: the ranks are being stopped already; once more kills at once")
            return
        reason, running = request.reason, count_ranks(self._table.running_ranks())
        if self._step is _Step.RUNNING and not request.at_once:
            self._sink.note(f"{reason}: stopping {running} (grace {self._grace}); once more kills at once")
            self._ask(request.stop.signal, reason=reason)
        elif self._step in (_Step.RUNNING, _Step.ASKED):
            self._step = _Step.FORCED
            self._sink.note(f"{reason}: killing {running}")
            self._sink.event("kill", why=reason)
            self._broadcast(Kill())
        elif not request.at_once:
            self._step = _Step.LEFT
            self._sink.note(f"{reason}: leaving; agents go on killing")

    def expect_end(self, link: Link) -> None:
        """Gives a host until the end of the grace, and a margin, to be done."""
        if link.deadline_s is None:
            link.deadline_s = time.monotonic() + self._grace_s + _END_MARGIN_S

    def _ask(self, signum: int, *, reason: str) -> None:
        self._step = _Step.ASKED
        self._table.stopped_at_s = time.time()
        self._sink.event("stop", why=reason, signal=signal_name(signum))
        self._broadcast(Stop(signal=signum))

    def _broadcast(self, message: Stop | Kill) -> None:
        for link in self._links:
            if link.over:
                continue
            if link.cancel():
                self._cancelled(link)
            else:
                link.send(message)
                self.expect_end(link)

    @property
    def _grace(self) -> str:
        return format_duration(self._grace_s)


def count_ranks(count: int, which: str = "") -> str:
    """`1` -> `1 rank`; `3, "other"` -> `3 other ranks`."""
    words = f"{count} {which} rank" if which else f"{count} rank"
    return words if count == 1 else f"{words}s"
