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

import errno
import os
import selectors
import signal
import time
from collections.abc import Sequence

import psutil

from . import processes
from .host_ranks import HostRanks
from .plan import LaunchPlan
from .protocol import (
    VERSION,
    Failed,
    Finished,
    FrameReader,
    Hello,
    Kill,
    Message,
    ProtocolError,
    Start,
    Stop,
    encode,
)
from .relay import Relay

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
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector, report_fd)
        self._ranks = HostRanks(
            self._plan, start.node_rank, selector=self._selector, relay=self._relay, on_lost=self._fail
        )
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
            self._ranks.start(os.environ)
        except OSError as error:
            self._fail(f"cannot start the ranks: {_words_of(error)}")
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

    # --- the way down, see [Note: stopping]

    def _fail(self, reason: str) -> None:
        self._relay.send(Failed(reason=reason, time_s=time.time()))
        self._kill()

    def _ask(self, signum: int) -> None:
        if self._grace_until_s is not None or self._killing_since_s is not None:
            return
        if not self._ranks.pids:
            # Ranks that are not known yet cannot be asked, and have nothing to save.
            self._kill()
            return
        self._grace_until_s = time.monotonic() + self._plan.grace_s
        processes.send_to_groups(self._ranks.pids, signum)

    def _kill(self) -> None:
        if self._killing_since_s is None:
            self._killing_since_s = time.monotonic()

    def _advance(self) -> bool:
        """Does what is due now; returns whether everything has ended."""
        now_s = time.monotonic()
        self._ranks.reap(spawner_may_end=self._killing_since_s is not None)
        if self._grace_until_s is not None and now_s >= self._grace_until_s:
            self._kill()
        if self._killing_since_s is not None:
            return self._kill_round(self._killing_since_s, now_s)
        if not self._ranks.all_ended:
            return False
        if left := self._ranks.processes_left():
            self._ask_lingerers(left, now_s)
            return False
        return self._ranks.release_spawner() and self._drained(now_s)

    def _ask_lingerers(self, left: list[psutil.Process], now_s: float) -> None:
        if self._lingerers_asked:
            return
        self._lingerers_asked = True
        for process in left:
            processes.send(process, signal.SIGTERM)
        if self._grace_until_s is None:
            self._grace_until_s = now_s + self._plan.grace_s

    def _kill_round(self, since_s: float, now_s: float) -> bool:
        left = self._ranks.processes_left()
        if left and now_s >= since_s + _KILL_PATIENCE_S:
            self._unkillable = [process.pid for process in left]
            return True
        for process in left:
            processes.send(process, signal.SIGKILL)
        if not (self._ranks.pids and now_s < since_s + _SPAWNER_PATIENCE_S) and self._ranks.kill_spawner():
            # It has nothing to report, or does not: otherwise it is waited for, as it knows how the ranks ended.
            return False
        if left or not (self._ranks.all_ended or self._ranks.spawner_ended):
            return False
        return self._ranks.release_spawner() and self._drained(now_s)

    def _drained(self, now_s: float) -> bool:
        """Whether all output was read; a pipe that does not end though nobody is left is given up at last."""
        if not self._relay.unread:
            return True
        return not self._relay.unsent and now_s - self._relay.moved_at_s > _DRAIN_PATIENCE_S

    def _patience_s(self) -> float | None:
        if self._killing_since_s is not None or self._ranks.all_ended:
            return _ROUND_S
        if self._grace_until_s is not None:
            return max(0.0, self._grace_until_s - time.monotonic())
        return None


def _words_of(error: OSError) -> str:
    words = (error.strerror or str(error)).lower()
    if error.errno == errno.EMFILE:
        return f"{words}; raise `ulimit -n`"
    return words if error.filename is None else f"{os.fsdecode(error.filename)}: {words}"
