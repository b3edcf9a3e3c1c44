"""The agent: one per host; runs the host's ranks through a spawner and answers for their end.

Started over a channel, speaks the protocol on stdin and stdout, and imports the standard library and psutil only.
Decides nothing about the job: the front end says when to stop. But its stdin is the lifeline: when that ends,
however the front end ended, the agent stops everything by itself. It exits only when nothing of the job is left.

[Note: stopping] One way down, entered at any step and never walked back:
- asked: the signal went to every rank's process group; one grace for all ranks together runs.
- killing: SIGKILL to everything below the agent, in rounds, until nothing is left.
What outlives the ranks (detached processes included) is asked when the last rank has ended, then killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Sequence

import psutil

from dsrun.contract import read_error_file

from . import processes
from .failures import describe_status
from .plan import LaunchPlan
from .protocol import (
    VERSION,
    Exit,
    Failed,
    Finished,
    FrameReader,
    Hello,
    Kill,
    Message,
    ProtocolError,
    Start,
    Started,
    Stop,
    encode,
)
from .relay import Relay
from .spawner_pipe import SpawnerPipe
from .worker import error_file

_READ_BYTES = 1 << 16
#: Between two looks at processes that must end and give no event when they do.
_ROUND_S = 0.05
#: From SIGKILL to giving up on what is left (a process stuck in the kernel, or another user's).
_KILL_PATIENCE_S = 20.0
#: From SIGKILL to killing the spawner too, should it not report the ends (a debugger may hold it).
_SPAWNER_PATIENCE_S = 2.0
#: For output still in pipes once nothing of the job is alive.
_DRAIN_PATIENCE_S = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Entry of the process; argv holds the job's id, for whoever looks at the list of processes."""
    report_fd = os.dup(1)
    os.dup2(2, 1)
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
    Agent(start, reader, report_fd).run(more)


def _read_first(reader: FrameReader) -> list[Message]:
    """Returns the first message and those that came with it; none if the front end is gone already."""
    while data := os.read(0, _READ_BYTES):
        if messages := reader.feed(data):
            return messages
    return []


class Agent:
    """The host's part of one job, from `Start` to `Finished`.

    Args:
        start: the launch.
        control: reads what comes after `start` on stdin.
        report_fd: where messages to the front end go.
    """

    def __init__(self, start: Start, control: FrameReader, report_fd: int) -> None:
        self._plan = LaunchPlan.from_json(start.plan)
        self._plan_json = start.plan
        self._node = self._plan.nodes[start.node_rank]
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector, report_fd)
        self._spawner: SpawnerPipe | None = None
        self._rank_of: dict[int, int] = {}
        self._ended: set[int] = set()
        self._grace_until_s: float | None = None
        self._killing_since_s: float | None = None
        self._lingerers_asked = False
        self._unkillable: list[int] = []

    def run(self, messages: Sequence[Message]) -> None:
        """Runs the ranks to their end, whatever the end is; returns when nothing is left of them.

        Args:
            messages: what came together with `start`.
        """
        processes.become_subreaper()
        self._listen_to_signals()
        self._selector.register(0, selectors.EVENT_READ, self._read_control)
        self._relay.send(Hello(pid=os.getpid(), time_s=time.time()))
        try:
            self._prepare_run_dir()
            self._start_spawner()
        except OSError as error:
            self._fail(f"cannot start: {error}")
        self._obey(messages)
        while not self._advance():
            for key, _ in self._selector.select(self._patience_s()):
                key.data()
        self._relay.close_streams()
        self._relay.send(Finished(unkillable=self._unkillable))
        while self._relay.unsent:
            # As long as it takes: only this process is left, and it ends with the front end.
            for key, _ in self._selector.select():
                key.data()

    # --- start

    def _prepare_run_dir(self) -> None:
        os.makedirs(self._plan.run_dir, mode=0o700, exist_ok=True)
        for worker in self._node.workers:
            # An earlier job's word must not be taken for this one's.
            error_file(self._plan.run_dir, worker.rank).unlink(missing_ok=True)

    def _start_spawner(self) -> None:
        self._spawner = SpawnerPipe(
            self._plan,
            self._plan_json,
            self._node.node_rank,
            environ=os.environ,
            address="127.0.0.1",
            open_stream=self._relay.open_stream,
        )
        self._selector.register(self._spawner, selectors.EVENT_READ, self._read_spawner)

    # --- events

    def _listen_to_signals(self) -> None:
        wake_fd, woken_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, *_STOP_SIGNALS):
            signal.signal(signum, processes.wake_up)

        def on_signal() -> None:
            if set(os.read(wake_fd, _READ_BYTES)) & set(_STOP_SIGNALS):
                self._ask(signal.SIGTERM)

        self._selector.register(wake_fd, selectors.EVENT_READ, on_signal)

    def _read_control(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._selector.unregister(0)
            self._relay.abandon()
            self._ask(signal.SIGTERM)
            return
        try:
            messages = self._control.feed(data)
        except ProtocolError as error:
            self._selector.unregister(0)
            self._fail(str(error))
            return
        self._obey(messages)

    def _obey(self, messages: Sequence[Message]) -> None:
        for message in messages:
            match message:
                case Stop(signal=signum):
                    self._ask(signum)
                case Kill():
                    self._kill()
                case _:
                    self._fail(f"unexpected message from the front end: {type(message).__name__}")

    def _read_spawner(self) -> bool:
        """Takes what the spawner reports; returns whether more may come."""
        assert self._spawner is not None, "its pipe was registered"
        reports = self._spawner.read()
        if reports is None:
            self._selector.unregister(self._spawner)
            return False
        for message in reports:
            self._on_report(message)
        return True

    def _on_report(self, message: Message) -> None:
        match message:
            case Started(pids=pids):
                self._rank_of = {pid: worker.rank for pid, worker in zip(pids, self._node.workers, strict=True)}
                self._relay.send(message)
            case Exit():
                self._report_exit(message.rank, message.status, message.time_s)
            case Failed(reason=reason):
                self._fail(reason)
            case _:
                raise AssertionError(f"the spawner never sends {type(message).__name__}")

    def _report_exit(self, rank: int, status: int, time_s: float) -> None:
        self._ended.add(rank)
        error = read_error_file(error_file(self._plan.run_dir, rank)) if status else None
        self._relay.send(Exit(rank=rank, status=status, time_s=time_s, error=error))

    # --- the way down, see [Note: stopping]

    def _fail(self, reason: str) -> None:
        self._relay.send(Failed(reason=reason, time_s=time.time()))
        self._kill()

    def _ask(self, signum: int) -> None:
        if self._grace_until_s is not None or self._killing_since_s is not None:
            return
        if not self._rank_of:
            # Ranks that are not known yet cannot be asked, and have nothing to save.
            self._kill()
            return
        self._grace_until_s = time.monotonic() + self._plan.grace_s
        processes.send_to_groups(self._rank_of, signum)

    def _kill(self) -> None:
        if self._killing_since_s is None:
            self._killing_since_s = time.monotonic()

    def _advance(self) -> bool:
        """Does what is due now; returns whether everything has ended."""
        now_s = time.monotonic()
        self._reap()
        if self._grace_until_s is not None and now_s >= self._grace_until_s:
            self._kill()
        if self._killing_since_s is not None:
            return self._kill_round(self._killing_since_s, now_s)
        if not self._ranks_ended:
            return False
        if left := self._below():
            self._ask_lingerers(left, now_s)
            return False
        return self._spawner_is_gone() and self._drained(now_s)

    def _ask_lingerers(self, left: list[psutil.Process], now_s: float) -> None:
        if self._lingerers_asked:
            return
        self._lingerers_asked = True
        for process in left:
            processes.send(process, signal.SIGTERM)
        if self._grace_until_s is None:
            self._grace_until_s = now_s + self._plan.grace_s

    def _kill_round(self, since_s: float, now_s: float) -> bool:
        left = self._below()
        if left and now_s >= since_s + _KILL_PATIENCE_S:
            self._unkillable = [process.pid for process in left]
            return True
        for process in left:
            processes.send(process, signal.SIGKILL)
        if self._spawner is not None and not (self._rank_of and now_s < since_s + _SPAWNER_PATIENCE_S):
            # It has nothing to report, or does not: otherwise it is waited for, as it knows how the ranks ended.
            self._spawner.kill()
            return False
        if left or not (self._ranks_ended or self._spawner is None):
            return False
        return self._spawner_is_gone() and self._drained(now_s)

    @property
    def _ranks_ended(self) -> bool:
        return len(self._ended) == len(self._node.workers)

    def _below(self) -> list[psutil.Process]:
        """Everything below the agent but the spawner, which stays to the end. See [Note: two reapers]."""
        spawner_pid = None if self._spawner is None else self._spawner.pid
        return [process for process in processes.descendants() if process.pid != spawner_pid]

    def _spawner_is_gone(self) -> bool:
        if self._spawner is not None:
            self._spawner.release()
        return self._spawner is None

    def _reap(self) -> None:
        ended = dict(processes.reap())
        if self._spawner is not None and self._spawner.pid in ended:
            # Before the ranks among these: they are ours only since it died, which is why they ended.
            self._spawner_ended(ended.pop(self._spawner.pid))
        for pid, status in ended.items():
            if pid in self._rank_of and self._rank_of[pid] not in self._ended:
                self._report_exit(self._rank_of[pid], status, time.time())

    def _spawner_ended(self, status: int) -> None:
        assert self._spawner is not None, "it was started"
        # What it reported before it died; the pipe ended with it.
        while self._spawner in self._selector.get_map() and self._read_spawner():
            pass
        self._spawner.close(status)
        self._spawner = None
        if not self._ranks_ended and self._killing_since_s is None:
            self._fail(f"the spawner {describe_status(status)} before its ranks ended")

    def _drained(self, now_s: float) -> bool:
        """Whether all output was read; a pipe that does not end though nobody is left is given up at last."""
        if not self._relay.unread:
            return True
        return not self._relay.unsent and now_s - self._relay.moved_at_s > _DRAIN_PATIENCE_S

    def _patience_s(self) -> float | None:
        if self._killing_since_s is not None or self._ranks_ended:
            return _ROUND_S
        if self._grace_until_s is not None:
            return max(0.0, self._grace_until_s - time.monotonic())
        return None
