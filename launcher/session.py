"""The front end's side of one attempt at a job: starts an agent on every host, merges what they send, stops them.

Prints nothing: output and news go to a `Sink`. Starts no rank and signals none: agents do. Everything is decided on
the caller's thread, in the order of one queue, and nothing there waits for a single host.

Requests of the user overtake all output that waits to be shown, and are obeyed while the reader of the output does
not read. How ranks are stopped stands in descent.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .causes import signal_name
from .descent import Descent, StopRequest, count_ranks
from .failures import HostLoss, UserStop, describe_status, is_mistake
from .hang import HangPolicy
from .host_folder import marked
from .hosts import HostSpec
from .keepalive import Keepalive
from .link import Ended, Link, LinkEvent, Opening, Received, Said, start_frame
from .passing import Passing
from .plan import LaunchPlan
from .progress_watch import ProgressWatch
from .protocol import (
    VERSION,
    Exit,
    Failed,
    Finished,
    Hello,
    Listening,
    Meet,
    Message,
    Note,
    Output,
    Passed,
    Pulse,
    Records,
    Signal,
    Stacks,
    Started,
    TakeStacks,
)
from .sink import Sink
from .sweep import sweep_command
from .sweeping import sweep_hosts
from .tally import Outcome, Tally
from .transport.base import Channel, Transport
from .worker import isolated_command

#: From starting an agent to its first word.
_HELLO_PATIENCE_S = 60.0
#: For all agents together to exit once nothing is expected of them.
_CLOSE_PATIENCE_S = 5.0
#: Hosts between the first knock and the agent's first word: jump hosts refuse more connections than a few dozen.
_OPEN_AT_ONCE = 64
#: Events that may wait to be handled, of one host and of all.
_ROOM_OF_ONE, _ROOM_OF_ALL = 64, 2048
#: Between two looks at which hosts are late or silent.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class _SignalRequest:
    signal: int


@dataclass(frozen=True, slots=True)
class _Remark:
    text: str


class _Wake:
    """Ends the wait for an event, so that a request is looked at."""


class Session:
    """One attempt, from its plan to its outcome.

    Args:
        plan: the launch; its run_dir must exist here.
        transport: how to reach the hosts.
        sink: where output and news go.
        python: the interpreter for agents and ranks on hosts that name none; dsrun must be importable there.
        hang: what becomes of an attempt without progress; the default policy if None.
    """

    def __init__(
        self, plan: LaunchPlan, transport: Transport, sink: Sink, *, python: str, hang: HangPolicy | None = None
    ) -> None:
        self.plan = plan
        #: Rank 0's host has said that it does not share the job's folder; None until it has said anything.
        self.first_host_is_apart: bool | None = None
        self._hang = hang or HangPolicy()
        self._transport = transport
        self._sink = sink
        self._python = python
        # SimpleQueue, because its put may run in a signal handler that interrupted its get.
        self._events: queue.SimpleQueue[LinkEvent | _Wake] = queue.SimpleQueue()
        self._requests: deque[StopRequest | _SignalRequest | _Remark] = deque()
        room = max(4, min(_ROOM_OF_ONE, _ROOM_OF_ALL // len(plan.nodes)))
        self._links = [Link(node, self._events.put, room=room, lease_s=plan.lease_s) for node in plan.nodes]
        self._expected = len(self._links)
        #: Hosts whose agent had the plan and was lost: something may be left there.
        self._abandoned: list[Link] = []
        self._keepalive = Keepalive(self._links, lease_s=plan.lease_s)
        self._passing = Passing()
        self._tally = Tally(plan)
        self._watch = ProgressWatch(self._tally, sink, plan, timeout_s=self._hang.timeout_s)
        self._descent = Descent(plan, self._links, self._tally, sink, cancelled=self._finish)
        self._look_at_s = 0.0

    def request_stop(self, signum: int, why: str | None = None) -> None:
        """Takes the user's wish to end the job; may be called from a signal handler. See [Note: escalation] in descent.

        Args:
            signum: the signal the user sent: ranks get it too, and the exit code becomes 128 + signum.
            why: what notes say instead of the signal's name, where it was no signal.
        """
        stop = UserStop(signal=signum, time_s=time.time())
        self._request(StopRequest(stop, why or signal_name(signum), at_once=False))

    def kill_now(self, signum: int = signal.SIGTERM) -> None:
        """Ends the job without grace; may be called from a signal handler.

        Args:
            signum: the exit code becomes 128 + signum.
        """
        stop = UserStop(signal=signum, time_s=time.time())
        self._request(StopRequest(stop, signal_name(signum), at_once=True))

    def pass_signal(self, signum: int) -> None:
        """Passes a signal on to the ranks that catch it, and stops nothing; may be called from a signal handler.

        Args:
            signum: the signal, SIGUSR1 for example.
        """
        self._request(_SignalRequest(signum))

    def remark(self, text: str) -> None:
        """Shows a note when the session's thread gets to it; may be called from a signal handler."""
        self._request(_Remark(text))

    def _request(self, request: StopRequest | _SignalRequest | _Remark) -> None:
        self._requests.append(request)
        self._events.put(_Wake())

    def obey_requests(self) -> bool:
        """Acts on what the user asked for since; for a sink that waits for its reader, on the session's thread.

        Returns:
            whether the job is still to be waited for.
        """
        while self._requests:
            match self._requests.popleft():
                case StopRequest() as request:
                    self._descent.on_request(request)
                case _SignalRequest(signum):
                    self._pass_on(signum)
                case _Remark(text):
                    self._sink.note(text)
        return not self._descent.is_left

    def run(self) -> Outcome:
        """Runs the attempt to its end, whatever the end is.

        Returns:
            the outcome; failures of ranks and hosts are part of it.
        """
        plan = self.plan
        hosts = [link.node.host.name for link in self._links]
        self._sink.event("start", attempt=plan.attempt, world_size=plan.world_size, hosts=hosts, resume=plan.resume)
        with marked(plan.run_dir) as mark:
            try:
                self._open(mark)
                while self.obey_requests() and self._expected:
                    self._wait_and_handle()
            finally:
                self._close()
                self._sweep()
                self._tally.end_outputs(self._sink.ended)
        return self._tally.outcome(tail=self._sink.tail, log=self._sink.log)

    def _open(self, mark: str) -> None:
        gate = threading.Semaphore(_OPEN_AT_ONCE)
        frame = start_frame(self.plan, mark)
        for link in self._links:
            link.open(lambda link=link: self._connect(link), frame(link.node.node_rank), gate)
        self._keepalive.start()

    def _connect(self, link: Link) -> Channel:
        host = link.node.host
        argv = isolated_command(host.python or self._python, "dsrun.launcher.agent", self.plan.job_id)
        return self._transport.start(host, argv)

    def _close(self) -> None:
        self._keepalive.stop()
        for link in self._links:
            link.end_input()
        if not self._descent.is_left:
            until_s = time.monotonic() + _CLOSE_PATIENCE_S
            for link in self._links:
                link.close(until_s)

    def _sweep(self) -> None:
        """Ends what lost agents left behind, so that nothing of this attempt meets the next."""
        if not self._abandoned or self._descent.is_left:
            return

        def command(host: HostSpec) -> list[str]:
            return sweep_command(host.python or self._python, self.plan.job_id, self.plan.nonce)

        lost = [link.node.host for link in self._abandoned]
        out_of_touch = [link.node.host.name for link in self._abandoned if link.is_out_of_touch]
        for swept in sweep_hosts(lost, command, self._transport, out_of_touch=out_of_touch):
            if swept.ended:
                self._sink.note(f"{swept.host}: ended what its lost agent left behind: {', '.join(swept.ended)}")
            if swept.left:
                self._tell_unkillable(swept.host, swept.left)

    # --- events

    def _wait_and_handle(self) -> None:
        now_s = time.monotonic()
        sink_at_s = self._sink.tick(now_s)
        if now_s >= self._look_at_s:
            self._look(now_s)
        until_s = self._look_at_s if sink_at_s is None else min(self._look_at_s, sink_at_s)
        try:
            event = self._events.get(timeout=max(0.0, until_s - now_s))
        except queue.Empty:
            return
        match event:
            case Opening(link):
                link.deadline_s = time.monotonic() + _HELLO_PATIENCE_S
            case Received(link, message):
                link.handled()
                if not link.over:
                    self._on_message(link, message)
            case Said(link, line):
                link.handled()
                self._sink.note(f"{link.node.host.name}: {line}")
            case Ended(link, reason):
                if not link.over:
                    if link.is_started:
                        self._abandoned.append(link)
                    self._finish(link)
                    self._lose(link, reason, last_lines=event.last_lines, hint=event.hint)
            case _Wake():
                pass

    def _on_message(self, link: Link, message: Message) -> None:
        match message:
            case Hello(version=version) if version != VERSION:
                self._give_up(link, f"its agent speaks protocol {version}, this dsrun speaks {VERSION}")
            case Hello():
                link.greet(message)
                link.deadline_s = None
                if link is self._links[0]:
                    self.first_host_is_apart = message.own_folder
            case Listening(address=address, port=port) if link is self._links[0]:
                for other in self._links[1:]:
                    if not other.over:
                        other.send(Meet(address=address, port=port))
            case Started(pids=pids):
                self._on_started(link, pids)
            case Pulse():
                self._sink.pulse(message.ranks)
                self._watch.pulse(message)
            case Stacks(ranks=ranks):
                self._watch.answered(link.node.host.name, ranks)
                self._judge_hang(time.monotonic())
            case Passed():
                self._passing.answered(link.node.host.name, message)
                self._tell_passed()
            case Output():
                self._watch.printed()
                self._sink.take(replace(message, time_s=link.our_time_s(message.time_s)))
            case Exit():
                self._on_exit(link, link.on_our_clock(message))
            case Records(text=text):
                self._sink.records(text)
            case Note(text=text):
                self._sink.note(f"{link.node.host.name}: {text}")
            case Failed():
                self._lose_by_itself(link, message)
            case Finished(unkillable=pids):
                self._finish(link)
                if pids:
                    self._tell_unkillable(link.node.host.name, pids)
            case _:
                self._give_up(link, f"its agent sent an unexpected {type(message).__name__}")

    def _on_started(self, link: Link, pids: Sequence[int]) -> None:
        self._tally.started(link.node, pids)
        self._watch.started(worker.rank for worker in link.node.workers)
        for worker, pid in zip(link.node.workers, pids, strict=True):
            self._sink.event("rank_started", rank=worker.rank, host=link.node.host.name, pid=pid)

    def _on_exit(self, link: Link, message: Exit) -> None:
        self._tally.exited(message)
        self._watch.ended(message.rank)
        host, status = link.node.host.name, message.status
        self._sink.event("rank_exit", rank=message.rank, host=host, status=status, oom_kills=message.oom_kills)
        if self._tally.all_ended(link.node):
            self._descent.expect_end(link)
        if status != 0:
            # Of bad input every rank ends by itself, and the report says all.
            failure = f"rank {message.rank} on {host} {describe_status(status)}"
            self._descent.after_failure(failure, silent=is_mistake(status, message.error))

    def _finish(self, link: Link) -> None:
        """Nothing more is expected of this host."""
        link.over = True
        self._expected -= 1
        self._passing.gone(link.node.host.name)
        self._tell_passed()
        self._watch.gone(link.node.host.name)

    def _tell_unkillable(self, host: str, pids: Sequence[int]) -> None:
        self._sink.note(f"{host}: processes {', '.join(map(str, pids))} did not end after SIGKILL")

    def _give_up(self, link: Link, reason: str) -> None:
        if link.is_started:
            self._abandoned.append(link)
        link.kill()
        self._finish(link)
        self._lose(link, reason)

    def _lose(self, link: Link, reason: str, *, last_lines: tuple[str, ...] = (), hint: str | None = None) -> None:
        host = link.node.host.name
        self._note_loss(link, HostLoss(host=host, reason=reason, time_s=time.time(), last_lines=last_lines, hint=hint))

    def _lose_by_itself(self, link: Link, failed: Failed) -> None:
        loss = HostLoss(
            host=link.node.host.name,
            reason=failed.reason,
            time_s=link.our_time_s(failed.time_s),
            hint=failed.hint,
            is_mistake=failed.is_mistake,
        )
        self._note_loss(link, loss)

    def _note_loss(self, link: Link, loss: HostLoss) -> None:
        """Notes the first reason for which a host is lost, and stops the others."""
        if self._tally.lost(loss):
            self._sink.event("host_lost", host=loss.host, reason=loss.reason)
            self._descent.expect_end(link)
            self._descent.after_failure(f"host {loss.host}: {loss.reason}")

    def _look(self, now_s: float) -> None:
        """Finds the hosts that are late or silent."""
        self._look_at_s = now_s + _LOOK_S
        # As long as events wait to be handled, it is this end that is late.
        up_to_date = self._events.empty()
        for link in self._links:
            if link.over:
                continue
            # Asked at every look, also where it does not count yet: what was not looked at would count at the first.
            is_silent = link.is_silent(now_s)
            if up_to_date and link.deadline_s is not None and now_s >= link.deadline_s:
                self._give_up(link, "its agent did not answer in time and was killed")
            elif is_silent and self._tally.is_running(link.node):
                self._give_up(link, f"no word from its agent for {self.plan.lease_s:g} s")

        running = [link for link in self._links if not link.over and self._tally.is_running(link.node)]
        if not self._descent.has_begun and self._watch.look(now_s, [link.node.host.name for link in running]):
            for link in running:
                link.send(TakeStacks())
        self._judge_hang(now_s)

    # --- progress

    def _judge_hang(self, now_s: float) -> None:
        """Does what the policy says, once it is known who hangs where."""
        hang = self._watch.verdict(now_s)
        if hang is None or self._descent.has_begun:
            return
        if self._hang.on_hang == "report":
            for line in hang.lines:
                self._sink.note(line)
        else:
            self._tally.hang = hang
            self._descent.after_failure(hang.lines[0].partition(":")[0], which="")

    # --- signals that stop nothing

    def _pass_on(self, signum: int) -> None:
        reached = [link for link in self._links if not link.over and link.is_started]
        self._passing.send(signum, [link.node.host.name for link in reached])
        for link in reached:
            link.send(Signal(signal=signum))
        self._tell_passed()

    def _tell_passed(self) -> None:
        for passed in self._passing.complete():
            name = signal_name(passed.signal)
            self._sink.event("signal", signal=name, ranks=passed.ranks, spared=passed.spared)
            spared = f"; {_named(passed.spared)} would have died of it and did not get it" if passed.spared else ""
            self._sink.note(f"{name}: passed to {count_ranks(len(passed.ranks))}{spared}")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
