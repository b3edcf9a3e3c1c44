"""The agent: one per host; runs the host's ranks through a spawner and answers for their end.

Started over a channel, speaks the protocol on stdin and stdout, and imports the standard library and psutil only.
Decides nothing about the job: the front end says when to stop. But its stdin is the lifeline: when that ends, or
nothing comes on it for as long as the plan's lease, the agent stops everything by itself, whatever became of the front
end. It exits only when nothing of the job is left.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from dsrun.contract.environment import CONFIG_ENV, HEARTBEAT_ENV, MEMORY_COPY_ENV, READING_ENV
from dsrun.contract.heartbeats import HeartbeatTable
from dsrun.errors import InputError

from .. import processes
from ..lifeline import Lifeline
from ..os_errors import refusal_of
from ..plan.launch_plan import GpuPlace, LaunchPlan
from ..protocol import (
    VERSION,
    Failed,
    Finished,
    FrameReader,
    Hello,
    Kill,
    Lease,
    Listening,
    Meet,
    Message,
    Note,
    Passed,
    Peers,
    ProtocolError,
    Signal,
    Start,
    Stop,
    TakeStacks,
    encode,
)
from ..rendezvous.static_thread import AllHostsPresent, StaticRendezvous, WaitingNote
from ..rendezvous.strangers import HostEnds, StrangerWatch, own_addresses
from ..transport.local import inherited_stdin
from .job_files import HostFolder, find_or_make
from .memory_copy_folder import CopyFolderLock, copy_folder_of, remove_abandoned
from .missing_paths import missing_here
from .ranks import HostRanks
from .relay import Relay
from .shutdown import HostShutdown
from .start.stdin_readers import ReadingPipe
from .status_reports import StatusReports
from .watch.rank_status import PULSE_S

_READ_BYTES = 1 << 16
#: For the front end's first word, before there is anything to stop: it may be lost between starting us and saying it.
_FIRST_WORD_PATIENCE_S = 60.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Entry of the process; argv holds the job's id, for whoever looks at the list of processes."""
    processes.outlive_user_signals()
    report_fd = os.dup(1)
    os.dup2(2, 1)
    stdin_fd = inherited_stdin(os.environ)
    reader = FrameReader()
    messages = _read_first(reader)
    if not messages:
        return
    start, *more = messages
    assert isinstance(start, Start), "the front end's first message is its start"
    if start.version != VERSION:
        reason = f"the agent speaks protocol {VERSION}, the front end {start.version}; install one dsrun on all hosts"
        os.write(report_fd, encode(Failed(reason=reason, time_s=time.time())))
        return
    # The interpreter is the one that runs here; the front end's may be at another path, or of another version.
    plan = LaunchPlan.from_json(start.plan).run_by(sys.executable)
    if start.gpus:
        plan = plan.with_gpus({plan.nodes[start.node_rank].host.name: tuple(GpuPlace(**gpu) for gpu in start.gpus)})
    try:
        folder = find_or_make(plan.run_dir, start.mark, plan.job_id)
        plan = _at_home(plan, folder, start.config)
    except OSError as error:
        reason = f"there is no place for the job's files: {refusal_of(error)}"
        os.write(report_fd, encode(Failed(reason=reason, time_s=time.time())))
        return
    Agent(plan, start.node_rank, folder, reader, report_fd, stdin_fd=stdin_fd).run(more)


def _at_home(plan: LaunchPlan, folder: HostFolder, config: str | None) -> LaunchPlan:
    """Returns the plan with paths as they are on this host."""
    path = plan.env.get(CONFIG_ENV)
    if not folder.is_own or config is None or path is None:
        return replace(plan, run_dir=folder.path)
    env = {**plan.env, CONFIG_ENV: folder.put(os.path.basename(path), config)}
    return replace(plan, run_dir=folder.path, env=env)


def _read_first(reader: FrameReader) -> list[Message]:
    """Returns the first message and those that came with it; none if the front end is gone already."""
    while select.select([0], [], [], _FIRST_WORD_PATIENCE_S)[0] and (data := os.read(0, _READ_BYTES)):
        if messages := reader.feed(data):
            return messages
    return []


class Agent:
    """The host's part of one job, from `Start` to `Finished`.

    Args:
        plan: the launch, as it is run on this host.
        node_rank: rank of this host among the plan's hosts.
        folder: folder of the job's files on this host.
        control: reader of the messages that come after `Start` on stdin.
        report_fd: file descriptor to which messages to the front end are written.
        stdin_fd: the front end's own stdin, for the plan's `stdin_rank`; None where it was not handed on.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        node_rank: int,
        folder: HostFolder,
        control: FrameReader,
        report_fd: int,
        *,
        stdin_fd: int | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector, report_fd)
        self._node_rank = node_rank
        self._heartbeats = HeartbeatTable(len(plan.nodes[node_rank].workers))
        self._readings = ReadingPipe()
        self._is_draining = False
        self._relay.before_output, self._relay.after_output = self._tell_ends_of_waits, self._tell_other_readings
        self._stdin_fd = stdin_fd
        self._ranks = HostRanks(
            plan,
            node_rank,
            own_folder=folder.is_own,
            selector=self._selector,
            relay=self._relay,
            last_beat=self._heartbeats.read,
            on_lost=self._fail,
        )
        self._reports = StatusReports(self._ranks, self._relay, self._heartbeats, folder)
        self._lifeline = Lifeline(self._plan.lease_s, time.monotonic())
        self._listens = True
        self._copies: CopyFolderLock | None = None
        self._strangers: StrangerWatch | None = None
        self._shutdown = HostShutdown(self._ranks, self._relay, grace_s=plan.grace_s)

    def run(self, messages: Sequence[Message]) -> None:
        """Runs the ranks to their end, whatever the end is; returns when nothing is left of them.

        Args:
            messages: messages that came together with `Start`.
        """
        processes.become_subreaper()
        self._listen_to_signals()
        self._selector.register(0, selectors.EVENT_READ, self._read_control)
        self._selector.register(self._readings, selectors.EVENT_READ, self._tell_readings)
        self._relay.send(self._hello())
        missing = missing_here(self._plan)
        if missing is not None:
            self._fail(missing.message, hint=missing.hint, is_mistake=True)
        elif self._plan.outside is not None:
            self._gather(self._plan.master_addr, self._plan.outside.port)
        elif self._node_rank == 0:
            self._start_first_host()
        self._obey(messages)
        while not self._has_ended():
            for key, _ in self._selector.select(self._patience_s()):
                key.data()
        self._ranks.end_scope(remove=not self._shutdown.unkillable)
        self._relay.close_streams()
        self._reports.send_rest()
        self._ranks.remove_pipes()
        self._remove_folder()
        self._end_copies()
        self._relay.send(Finished(unkillable=self._shutdown.unkillable))
        while self._relay.unsent:
            # As long as it takes: only this process is left, and it ends with the front end.
            self._report(time.monotonic())
            for key, _ in self._selector.select(PULSE_S):
                key.data()

    def _hello(self) -> Hello:
        addresses = own_addresses() if len(self._plan.nodes) > 1 else []
        return Hello(pid=os.getpid(), time_s=time.time(), own_folder=self._folder.is_own, addresses=addresses)

    def _has_ended(self) -> bool:
        now_s = time.monotonic()
        self._report(now_s)
        return self._shutdown.advance(now_s) and not self._ranks.is_asking(now_s)

    def _remove_folder(self) -> None:
        try:
            self._folder.remove()
        except OSError as error:
            self._relay.send(Note(text=f"the job's files are not removed: {refusal_of(error)}"))

    def _hold_copies(self) -> None:
        """Gives ranks a place for copies in memory, where there may be a further attempt or was one before."""
        path = copy_folder_of(self._plan.job_id, self._node_rank) if self._plan.max_restarts else None
        if path is None:
            return
        for refusal in remove_abandoned():
            self._relay.send(
                Note(text=f"copies in memory of a job that is over are not removed: {refusal_of(refusal)}")
            )
        try:
            self._copies = CopyFolderLock(path)
        except OSError as error:
            self._relay.send(Note(text=f"there is no place for copies in memory: {refusal_of(error)}"))

    def _end_copies(self) -> None:
        """Removes them, unless a further attempt may follow; see [Note: copies in memory] in memory_copy_folder."""
        if self._copies is None:
            return
        may_follow = self._listens and self._ranks.has_failed and self._plan.attempt < self._plan.max_restarts
        try:
            self._copies.end(remove=not may_follow)
        except OSError as error:
            self._relay.send(Note(text=f"copies in memory are not removed: {refusal_of(error)}"))

    def _start_first_host(self) -> None:
        try:
            rendezvous = self._ranks.open_store()
        except OSError as error:
            self._fail(f"cannot listen on {self._plan.master_addr} for the ranks to meet: {refusal_of(error)}")
            return
        self._relay.send(Listening(address=rendezvous[0], port=rendezvous[1]))
        nodes = self._plan.nodes
        self._strangers = StrangerWatch(
            *rendezvous,
            len(nodes[0].workers),
            others=None if len(nodes) > 1 else (),
            tell=lambda text: self._relay.send(Note(text=text)),
        )
        self._start_ranks(rendezvous)

    def _gather(self, address: str, port: int) -> None:
        """Finds together with hosts that have a dsrun of their own; the ranks start when all are there."""
        gathering = StaticRendezvous(self._plan)

        def on_news() -> None:
            news = gathering.next()
            if isinstance(news, WaitingNote):
                self._relay.send(Note(text=news.text))
                return
            self._selector.unregister(gathering)
            if isinstance(news, AllHostsPresent):
                if news.listener is not None:
                    self._ranks.take_store(news.listener)
                    self._relay.send(Listening(address=address, port=port))
                self._start_ranks((address, port))
            else:
                self._fail(str(news), hint=news.hint)

        self._selector.register(gathering, selectors.EVENT_READ, on_news)

    def _start_ranks(self, rendezvous: tuple[str, int]) -> None:
        if self._shutdown.is_killing or not self._ranks.spawner_ended:
            return
        try:
            self._hold_copies()
            copies = {} if self._copies is None else {MEMORY_COPY_ENV: self._copies.path}
            told = {HEARTBEAT_ENV: self._heartbeats.path, READING_ENV: self._readings.path}
            self._ranks.start({**os.environ, **told, **copies}, rendezvous, stdin_fd=self._stdin_fd)
        except OSError as error:
            self._fail(f"cannot start the ranks: {refusal_of(error)}")
        except InputError as error:
            self._fail(str(error), hint=error.hint, is_mistake=True)
        finally:
            if self._stdin_fd is not None:
                # Whoever writes to it is to see when the rank reads no more.
                os.close(self._stdin_fd)
                self._stdin_fd = None

    # --- events

    def _listen_to_signals(self) -> None:
        wake_fd, woken_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, *_STOP_SIGNALS):
            signal.signal(signum, processes.wake_up)

        def on_signal() -> None:
            if set(os.read(wake_fd, _READ_BYTES)) & set(_STOP_SIGNALS):
                self._shutdown.ask(signal.SIGTERM)

        self._selector.register(wake_fd, selectors.EVENT_READ, on_signal)

    def _read_control(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._lose_front_end()
            return
        self._lifeline.renew()
        try:
            messages = self._control.feed(data)
        except ProtocolError as error:
            self._listens = False
            self._selector.unregister(0)
            self._fail(str(error))
            return
        self._obey(messages)

    def _lose_front_end(self) -> None:
        if self._listens:
            self._listens = False
            self._selector.unregister(0)
        self._relay.abandon()
        self._shutdown.ask(signal.SIGTERM)

    def _obey(self, messages: Sequence[Message]) -> None:
        for message in messages:
            match message:
                case Stop(signal=signum):
                    self._shutdown.ask(signum)
                case Kill():
                    self._shutdown.kill()
                case Lease():
                    pass  # Any message renews it.
                case Meet(address=address, port=port):
                    self._start_ranks((address, port))
                case Peers(addresses=addresses) if self._strangers is not None:
                    peers = zip(addresses, self._plan.nodes[1:], strict=True)
                    self._strangers.meet([HostEnds.of(its, len(node.workers)) for its, node in peers])
                case Peers():
                    pass  # The store could not be opened.
                case Signal(signal=signum, rank=rank):
                    self._pass(signum, rank)
                case TakeStacks():
                    self._reports.take_stacks(time.monotonic())
                case _:
                    self._fail(f"unexpected message from the front end: {type(message).__name__}")

    def _tell_readings(self) -> None:
        """Sends what ranks tell of their stdin; see [Note: order of readings] in start/stdin_readers."""
        self._tell_ends_of_waits()
        self._tell_other_readings()

    def _tell_ends_of_waits(self) -> None:
        self._readings.read()
        if not self._is_draining:
            for told in self._readings.take(beginning=False):
                self._relay.send(told)

    def _tell_other_readings(self) -> None:
        if self._is_draining:
            return
        for told in self._readings.take(beginning=True):
            self._is_draining = True
            self._relay.drain(told.rank)
            self._is_draining = False
            self._relay.send(told)

    def _pass(self, signum: int, rank: int | None) -> None:
        """Passes a user's signal to the ranks that catch it, and to none of the processes that they started."""
        live = [each for each in self._ranks.live if rank in (None, each.rank)]
        caught = [each for each in live if processes.catches(each.process, signum)]
        for each in caught:
            processes.send(each.process, signum)
        spared = [each.rank for each in live if each not in caught]
        self._relay.send(Passed(signal=signum, ranks=[each.rank for each in caught], spared=spared))

    def _report(self, now_s: float) -> None:
        """Sends what is due to be told, once it is sure that somebody listens."""
        if self._listens and self._lifeline.has_run_out(now_s):
            self._lose_front_end()
        if now_s >= self._reports.pulse_at_s:
            self._ranks.kill_failed(now_s)
            self._ranks.count_kills(now_s)
            if self._strangers is not None and self._ranks.live:
                self._strangers.look(now_s)
        self._reports.send_due(now_s)

    def _fail(self, reason: str, *, hint: str | None = None, is_mistake: bool = False) -> None:
        self._relay.send(Failed(reason=reason, time_s=time.time(), hint=hint, is_mistake=is_mistake))
        self._shutdown.kill()

    def _patience_s(self) -> float:
        now_s = time.monotonic()
        due_s = self._shutdown.due_s(now_s)
        return max(0.0, (self._reports.due_s if due_s is None else min(self._reports.due_s, due_s)) - now_s)
