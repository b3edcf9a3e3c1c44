"""The front end's side of a job: starts an agent on every host, merges what they send, and decides when to stop.

Prints nothing: output and news go to a `Sink`. Starts no rank and signals none: agents do. Everything is decided on
the caller's thread, in the order of one queue.

[Note: escalation] A stop is asked, then forced, then left: the first request sends the signal to all ranks with the
plan's grace, the second kills them now, the third returns at once and leaves the kill to the agents, whose
lifelines end. The first failure asks as well, so one request of the user after it forces. Requests overtake all
output that waits to be shown, and are obeyed while the reader of the output does not read.
"""

from __future__ import annotations

import enum
import queue
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsrun.errors import LaunchError
from dsrun.units import format_duration

from .failures import HostLoss, UserStop, describe_status, is_mistake, signal_name
from .link import Ended, Link, LinkEvent, Received, Said
from .plan import LaunchPlan
from .protocol import (
    VERSION,
    Exit,
    Failed,
    Finished,
    Hello,
    Kill,
    Listening,
    Message,
    Output,
    Passed,
    Pulse,
    RankPulse,
    Signal,
    Started,
    Stop,
)
from .tally import Outcome, Tally
from .transport.base import Transport
from .worker import isolated_command

#: From starting an agent to its first word.
_HELLO_PATIENCE_S = 60.0
#: Beyond the grace: for an agent to kill, to give up on what cannot be killed, and to send the rest of the output.
_END_MARGIN_S = 40.0


class Sink(Protocol):
    """What becomes of a job's output and news; called on the thread that runs the session, and may not raise."""

    def take(self, frame: Output) -> None:
        """Bytes of a rank, in order for each rank."""
        ...

    def ended(self, rank: int, last_word: str | None) -> None:
        """No more bytes come from a rank; what it left without an end of line is shown.

        Args:
            rank: which one.
            last_word: what it left beside its streams, to end its log with.
        """
        ...

    def tail(self, rank: int) -> tuple[str, ...]:
        """The rank's last lines, both streams."""
        ...

    def log(self, rank: int) -> str:
        """Path of the rank's complete output."""
        ...

    def note(self, text: str) -> None:
        """One line about the job itself, for people."""
        ...

    def event(self, name: str, **fields: Any) -> None:
        """One fact about the job, for `events.jsonl`; values are plain JSON."""
        ...

    def pulse(self, ranks: Sequence[RankPulse]) -> None:
        """How the ranks of one host fare."""
        ...

    def tick(self, now_s: float) -> float | None:
        """Does what is due by the monotonic clock; returns when it wants to be called next, if at all."""
        ...


class _Step(enum.Enum):
    """See [Note: escalation]."""

    RUNNING = enum.auto()
    ASKED = enum.auto()
    FORCED = enum.auto()
    LEFT = enum.auto()


@dataclass(frozen=True, slots=True)
class _UserRequest:
    stop: UserStop
    why: str
    at_once: bool


class _Wake:
    """Ends the wait for an event, so that a request is looked at."""


class Session:
    """One job, from its plan to its outcome.

    Args:
        plan: the launch; its run_dir must exist here.
        transport: how to reach the hosts.
        sink: where output and news go.
        python: the interpreter for the agents; dsrun must be importable there.
    """

    def __init__(self, plan: LaunchPlan, transport: Transport, sink: Sink, *, python: str) -> None:
        self._plan = plan
        self._transport = transport
        self._sink = sink
        self._python = python
        # SimpleQueue, because its put may run in a signal handler that interrupted its get.
        self._events: queue.SimpleQueue[LinkEvent | _Wake] = queue.SimpleQueue()
        self._requests: deque[_UserRequest | int] = deque()
        self._links: list[Link] = []
        self._tally = Tally(plan)
        self._step = _Step.RUNNING

    def request_stop(self, signum: int, why: str | None = None) -> None:
        """Takes the user's wish to end the job; may be called from a signal handler. See [Note: escalation].

        Args:
            signum: the signal the user sent: ranks get it too, and the exit code becomes 128 + signum.
            why: what notes say instead of the signal's name, where it was no signal.
        """
        self._request(signum, why=why, at_once=False)

    def kill_now(self, signum: int = signal.SIGTERM) -> None:
        """Ends the job without grace; may be called from a signal handler.

        Args:
            signum: the exit code becomes 128 + signum.
        """
        self._request(signum, at_once=True)

    def pass_signal(self, signum: int) -> None:
        """Passes a signal on to the ranks that catch it, and stops nothing; may be called from a signal handler.

        Args:
            signum: the signal, SIGUSR1 for example.
        """
        self._requests.append(signum)
        self._events.put(_Wake())

    def _request(self, signum: int, *, at_once: bool, why: str | None = None) -> None:
        stop = UserStop(signal=signum, time_s=time.time())
        self._requests.append(_UserRequest(stop, why or signal_name(signum), at_once))
        self._events.put(_Wake())

    def obey_requests(self) -> bool:
        """Acts on what the user asked for since; for a sink that waits for its reader, on the session's thread.

        Returns:
            whether the job is still to be waited for.
        """
        while self._requests:
            match self._requests.popleft():
                case _UserRequest() as request:
                    self._on_user_request(request)
                case signum:
                    self._pass_on(signum)
        return self._step is not _Step.LEFT

    def run(self) -> Outcome:
        """Runs the job to its end, whatever the end is.

        Returns:
            the outcome; failures of ranks and hosts are part of it.

        Raises:
            LaunchError: an agent could not be started; what was started is stopped.
        """
        if len(self._plan.nodes) > 1:
            names = ", ".join(node.host.name for node in self._plan.nodes)
            raise LaunchError(f"hosts {names}: a job over several hosts cannot be started yet")
        try:
            self._open()
            while self.obey_requests() and not all(link.over for link in self._links):
                self._wait_and_handle()
        finally:
            for link in self._links:
                link.close(wait=self._step is not _Step.LEFT)
            self._tally.end_outputs(self._sink.ended)
        return self._tally.outcome(tail=self._sink.tail, log=self._sink.log)

    def _open(self) -> None:
        argv = isolated_command(self._python, "dsrun.launcher.agent", self._plan.job_id)
        for node in self._plan.nodes:
            link = Link(node, self._transport.start(node.host, argv), self._events.put)
            link.deadline_s = time.monotonic() + _HELLO_PATIENCE_S
            self._links.append(link)
            link.begin(self._plan)

    # --- events

    def _wait_and_handle(self) -> None:
        deadlines = [link.deadline_s for link in self._links if link.deadline_s is not None and not link.over]
        try:
            timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            # Only now: as long as events wait to be handled, it is this end that is late.
            self._give_up_on_late_hosts()
            return
        match event:
            case Received(link, message):
                link.handled()
                if not link.over:
                    self._on_message(link, message)
            case Said(link, line):
                link.handled()
                self._sink.note(f"{link.node.host.name}: {line}")
            case Ended(link, fault):
                if not link.over:
                    reason, last_lines = link.why_lost(fault)
                    self._lose(link, reason, last_lines=last_lines)
                    link.over = True
            case _Wake():
                pass

    def _on_message(self, link: Link, message: Message) -> None:
        match message:
            case Hello(version=version) if version != VERSION:
                self._lose(link, f"its agent speaks protocol {version}, this dsrun speaks {VERSION}")
                link.kill()
            case Hello():
                link.greet(message)
                link.deadline_s = None
            case Started(pids=pids):
                self._tally.started(link.node, pids)
            case Listening():
                pass  # The ranks of this one host know it already.
            case Pulse(ranks=ranks):
                self._sink.pulse(ranks)
            case Passed():
                self._on_passed(link, message)
            case Output():
                self._sink.take(message)
            case Exit():
                self._on_exit(link, link.on_our_clock(message))
            case Failed(reason=reason, time_s=time_s):
                self._lose(link, reason, time_s=link.our_time_s(time_s))
            case Finished(unkillable=pids):
                link.over = True
                if pids:
                    listed = ", ".join(map(str, pids))
                    self._sink.note(f"{link.node.host.name}: processes {listed} did not end after SIGKILL")
            case _:
                self._lose(link, f"its agent sent an unexpected {type(message).__name__}")
                link.kill()

    def _on_exit(self, link: Link, message: Exit) -> None:
        self._tally.exited(message)
        if self._tally.all_ended(link.node):
            self._expect_end(link)
        if message.status != 0:
            host = link.node.host.name
            failure = f"rank {message.rank} on {host} {describe_status(message.status)}"
            # Of bad input every rank ends by itself, and the report says all.
            self._stop_after(failure, silent=is_mistake(message.status, message.error))

    def _lose(self, link: Link, reason: str, *, time_s: float | None = None, last_lines: tuple[str, ...] = ()) -> None:
        """Notes the first reason for which a host is lost, and stops the others."""
        host = link.node.host.name
        since_s = time.time() if time_s is None else time_s
        if self._tally.lost(HostLoss(host=host, reason=reason, time_s=since_s, last_lines=last_lines)):
            self._expect_end(link)
            self._stop_after(f"host {host}: {reason}")

    # --- the way down

    def _stop_after(self, failure: str, *, silent: bool = False) -> None:
        if self._step is not _Step.RUNNING:
            return
        running = self._tally.running_ranks()
        if running and not silent:
            self._sink.note(f"{failure}; stopping {_ranks(running, 'other')} (grace {self._grace})")
        self._ask(signal.SIGTERM)

    def _on_user_request(self, request: _UserRequest) -> None:
        self._tally.user_stop = self._tally.user_stop or request.stop
        why, running = request.why, _ranks(self._tally.running_ranks())
        if self._step is _Step.RUNNING and not request.at_once:
            self._ask(request.stop.signal)
            self._sink.note(f"{why}: stopping {running} (grace {self._grace}); once more kills at once")
        elif self._step in (_Step.RUNNING, _Step.ASKED):
            self._step = _Step.FORCED
            self._broadcast(Kill())
            self._sink.note(f"{why}: killing {running}")
        elif not request.at_once:
            self._step = _Step.LEFT
            self._sink.note(f"{why}: leaving; agents go on killing")

    def _pass_on(self, signum: int) -> None:
        for link in self._links:
            if not link.over:
                link.send(Signal(signal=signum))

    def _on_passed(self, link: Link, message: Passed) -> None:
        name, host = signal_name(message.signal), link.node.host.name
        self._sink.event("signal", signal=name, host=host, ranks=message.ranks, spared=message.spared)
        spared = f"; {_named(message.spared)} would have died of it" if message.spared else ""
        self._sink.note(f"{name}: passed to {_ranks(len(message.ranks))} on {host}{spared}")

    def _ask(self, signum: int) -> None:
        self._step = _Step.ASKED
        self._broadcast(Stop(signal=signum))

    def _broadcast(self, message: Message) -> None:
        for link in self._links:
            if not link.over:
                link.send(message)
                self._expect_end(link)

    def _expect_end(self, link: Link) -> None:
        if link.deadline_s is None:
            link.deadline_s = time.monotonic() + self._plan.grace_s + _END_MARGIN_S

    def _give_up_on_late_hosts(self) -> None:
        now_s = time.monotonic()
        for link in self._links:
            if not link.over and link.deadline_s is not None and now_s >= link.deadline_s:
                link.kill()
                link.over = True
                self._lose(link, "its agent did not answer in time and was killed")

    # --- words

    @property
    def _grace(self) -> str:
        return format_duration(self._plan.grace_s)


def _ranks(count: int, which: str = "") -> str:
    words = f"{count} {which} rank" if which else f"{count} rank"
    return words if count == 1 else f"{words}s"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
