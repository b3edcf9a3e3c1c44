"""What every word of a host, and every silence, makes of one attempt at a job: facts noted, others stopped, news told.

Opens and closes no channel, waits for nothing and keeps no thread: the session brings what was said, in order. Which
failure counts is judged by `rank_table`, how ranks are stopped stands in `shutdown`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from ..failures.causes.recognise import signal_name
from ..failures.hang import HangPolicy
from ..failures.report import HostLoss, UserStop, describe_status, is_mistake
from ..plan.launch_plan import LaunchPlan
from ..protocol import (
    VERSION,
    Exit,
    Failed,
    Finished,
    GpuFindings,
    Hello,
    Listening,
    Meet,
    Message,
    Note,
    Output,
    Passed,
    Peers,
    Pulse,
    RankTraceBytes,
    Reading,
    Records,
    Signal,
    Stacks,
    Started,
    TakeStacks,
)
from ..transport.base import WAIT_LONGER
from .agent_link import ChannelEnd, Link
from .forwarded_signals import SignalRelay
from .interrupts import Interrupts
from .progress_watch import ProgressWatch
from .rank_table import RankTable
from .shutdown import Shutdown, count_ranks
from .sink import Sink


class Attempt:
    """One attempt, as far as its hosts have told of it.

    Args:
        plan: the launch.
        links: every host, in the plan's order.
        sink: receiver of output and news.
        hang: policy for an attempt without progress.
    """

    def __init__(self, plan: LaunchPlan, links: Sequence[Link], sink: Sink, hang: HangPolicy) -> None:
        #: Rank 0's host has said that it does not share the job's folder; None until it has said anything.
        self.first_host_is_apart: bool | None = None
        #: Hosts of which something is still expected.
        self.expected = len(links)
        #: Hosts whose agent had the plan and was lost: something may be left there.
        self.abandoned: list[Link] = []
        self.table = RankTable(plan)
        self.shutdown = Shutdown(plan, links, self.table, sink, cancelled=self._finish)
        #: Of hosts that have answered, by name: their addresses.
        self._addresses: dict[str, list[str]] = {}
        #: Hosts that do not share the job's folder.
        self._apart: set[str] = set()
        self._lease_s = plan.lease_s
        self._links = links
        self._sink = sink
        self._hang = hang
        self._signal_relay = SignalRelay()
        self._interrupts = Interrupts()
        #: What ended a rank, while hosts are still to say where the others are.
        self._put_off: str | None = None
        self._watch = ProgressWatch(self.table, sink, plan, timeout_s=hang.timeout_s, start_limit_s=hang.start_limit_s)

    def on_message(self, link: Link, message: Message) -> None:
        """Takes what a host that is not over says."""
        match message:
            case Hello(version=version) if version != VERSION:
                self._give_up(link, f"its agent speaks protocol {version}, this dsrun speaks {VERSION}")
            case Hello():
                link.greet(message)
                if link.clock_offset_s:
                    self._sink.event("clock", host=link.node.host.name, offset_s=round(link.clock_offset_s, 6))
                link.deadline_s = None
                if message.own_folder:
                    self._apart.add(link.node.host.name)
                if link is self._links[0]:
                    self.first_host_is_apart = message.own_folder
                self._introduce(link, message.addresses)
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
                if link.node.host.name in self._apart:
                    self._sink.stacks(ranks)
                self._watch.answered(link.node.host.name, ranks)
                self._judge_hang(time.monotonic())
            case Passed():
                self._signal_relay.answered(link.node.host.name, message)
                self._tell_passed()
            case Output():
                if self._watch.printed(message) and not self.shutdown.has_begun:
                    self._watch.ask(time.monotonic(), self._ask_where_ranks_are())
                self._sink.take(replace(message, time_s=link.our_time_s(message.time_s)))
            case Reading():
                self._watch.reading(message)
                self._interrupts.reading(message)
                self._sink.reading(message)
            case Exit():
                self._on_exit(link, link.on_our_clock(message))
            case GpuFindings():
                self.table.asked_driver(link.node.host.name, message)
            case Records(text=text):
                self._sink.records(text)
            case RankTraceBytes():
                self._sink.rank_trace(message)
            case Note(text=text):
                self._sink.note(f"{link.node.host.name}: {text}")
            case Failed():
                self._lose_by_itself(link, message)
            case Finished(unkillable=pids):
                self._finish(link)
                if pids:
                    self.tell_unkillable(link.node.host.name, pids)
            case _:
                self._give_up(link, f"its agent sent an unexpected {type(message).__name__}")

    def _introduce(self, link: Link, addresses: list[str]) -> None:
        """Tells the first host who the others are, once all have said it."""
        first, *others = self._links
        self._addresses[link.node.host.name] = addresses
        if others and not first.over and len(self._addresses) == len(self._links):
            first.send(Peers(addresses=[self._addresses[other.node.host.name] for other in others]))

    def on_ended(self, event: ChannelEnd) -> None:
        """Takes the end of a host's channel."""
        link = event.link
        if link.over:
            return
        if link.is_started:
            self.abandoned.append(link)
        self._finish(link)
        self._lose(link, event.reason, last_lines=event.last_lines, hint=event.hint)

    def _on_started(self, link: Link, pids: Sequence[int]) -> None:
        self.table.started(link.node, pids)
        self._watch.started(worker.rank for worker in link.node.workers)
        for worker, pid in zip(link.node.workers, pids, strict=True):
            self._sink.event("rank_started", rank=worker.rank, host=link.node.host.name, pid=pid)

    def _on_exit(self, link: Link, message: Exit) -> None:
        self.table.exited(message)
        self._watch.ended(message.rank)
        host, status = link.node.host.name, message.status
        if (stop := self._interrupts.ended(message.rank, status)) is not None:
            self.table.user_stop = self.table.user_stop or stop
        oom = None if message.oom is None else asdict(message.oom)
        self._sink.event("rank_exit", rank=message.rank, host=host, status=status, oom=oom)
        if self.table.all_ended(link.node):
            self.shutdown.expect_end(link)
        if status != 0:
            # Of bad input every rank ends by itself, and the report says all.
            failure = f"{self.table.name_of(message.rank)} on {host} {describe_status(status)}"
            if not self._watch.is_asking_before_end:
                self.shutdown.after_failure(failure, silent=is_mistake(status, message.error))
            elif self._put_off is None:
                # See [Note: torch ends a rank] in hang: who is stopped now cannot say any more where it was.
                self._put_off = failure

    def _finish(self, link: Link) -> None:
        """Nothing more is expected of this host."""
        link.over = True
        self.expected -= 1
        self._signal_relay.gone(link.node.host.name)
        self._tell_passed()
        self._watch.gone(link.node.host.name)

    def tell_unkillable(self, host: str, pids: Sequence[int]) -> None:
        """Names processes that outlived SIGKILL."""
        self._sink.note(f"{host}: processes {', '.join(map(str, pids))} did not end after SIGKILL")

    def _give_up(self, link: Link, reason: str, *, hint: str | None = None) -> None:
        if link.is_started:
            self.abandoned.append(link)
        link.kill()
        self._finish(link)
        self._lose(link, reason, hint=hint)

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
        if self.table.lost(loss):
            self._sink.event("host_lost", host=loss.host, reason=loss.reason)
            self.shutdown.expect_end(link)
            self.shutdown.after_failure(f"host {loss.host}: {loss.reason}")

    def look(self, now_s: float, *, up_to_date: bool) -> None:
        """Finds the hosts that are late or silent, and what hangs; to be called every second or so.

        Args:
            now_s: monotonic.
            up_to_date: nothing that hosts have said waits to be taken. Else it is this end that is late.
        """
        for link in self._links:
            if link.over:
                continue
            # Asked at every look, also where it does not count yet: what was not looked at would count at the first.
            is_silent = link.is_silent(now_s)
            if up_to_date and link.deadline_s is not None and now_s >= link.deadline_s:
                self._give_up(link, "its agent did not answer in time and was killed", hint=WAIT_LONGER)
            elif is_silent and self.table.is_running(link.node):
                self._give_up(link, f"no word from its agent for {self._lease_s:g} s")

        if not self.shutdown.has_begun and self._watch.look(now_s, [link.node.host.name for link in self._running()]):
            self._ask_where_ranks_are()
        self._judge_hang(now_s)

    def _running(self) -> list[Link]:
        return [link for link in self._links if not link.over and self.table.is_running(link.node)]

    def _ask_where_ranks_are(self) -> list[str]:
        """Asks all hosts with ranks that run, and returns their names."""
        running = self._running()
        for link in running:
            link.send(TakeStacks())
        return [link.node.host.name for link in running]

    def _judge_hang(self, now_s: float) -> None:
        """Does what the policy says, once it is known who hangs where."""
        hang = self._watch.verdict(now_s)
        if self._put_off is not None and not self._watch.is_asking_before_end:
            failure, self._put_off = self._put_off, None
            self.shutdown.after_failure(failure)
        if hang is None or self.shutdown.has_begun:
            return
        if self._hang.on_hang == "report":
            for line in hang.lines:
                self._sink.note(line)
        else:
            self.table.hang = hang
            self.shutdown.after_failure(hang.lines[0].partition(":")[0], which="")

    def pass_on(self, signum: int) -> None:
        """Passes a signal on to the ranks that catch it; stops nothing."""
        reached = [link for link in self._links if not link.over and link.is_started]
        self._signal_relay.send(signum, [link.node.host.name for link in reached])
        for link in reached:
            link.send(Signal(signal=signum))
        self._tell_passed()

    def interrupt(self, stop: UserStop) -> bool:
        """Gives an interrupt to the rank that waits for a person, if one does; returns whether it was for that one."""
        rank = None if self.shutdown.has_begun else self._interrupts.take(stop)
        if rank is None:
            return False
        for link in self._links:
            if not link.over and any(worker.rank == rank for worker in link.node.workers):
                link.send(Signal(signal=stop.signal, rank=rank))
        self._sink.event("signal", signal=signal_name(stop.signal), ranks=[rank], spared=[])
        return True

    def _tell_passed(self) -> None:
        for passed in self._signal_relay.complete():
            name = signal_name(passed.signal)
            self._sink.event("signal", signal=name, ranks=passed.ranks, spared=passed.spared)
            spared = f"; {_named(passed.spared)} would have died of it and did not get it" if passed.spared else ""
            self._sink.note(f"{name}: passed to {count_ranks(len(passed.ranks))}{spared}")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
