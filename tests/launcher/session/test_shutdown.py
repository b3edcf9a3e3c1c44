"""One way down: the first failure asks all, the user's next request kills, and hosts that have not begun never do."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dsrun.launcher.failures.report import UserStop
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.protocol import Finished, Hello, Kill, Message, Stop
from dsrun.launcher.session.agent_link import Link, LinkEvent, MessageReceived, start_frame
from dsrun.launcher.session.rank_table import RankTable
from dsrun.launcher.session.shutdown import Shutdown, StopRequest, count_ranks
from dsrun.launcher.transport.fake import Await, FakeTransport
from support.jobs import RecordingSink, program_plan

_PATIENCE_S = 20.0


class Way:
    """Two hosts on the way down, of which the second has not begun."""

    def __init__(self, folder: Path) -> None:
        plan = program_plan(folder, "command", "true", hosts=2)
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self._transport = FakeTransport({"here": [Hello(pid=1, time_s=0), Await(Finished)]})
        self.sink = RecordingSink()
        self.links = [Link(node, self._events.put, room=8, lease_s=15) for node in plan.nodes]
        self.table = RankTable(plan)
        self.cancelled: list[Link] = []
        output = JobOutput(plan, self.sink)
        self.shutdown = Shutdown(plan, self.links, self.table, output, cancelled=self.cancelled.append)
        first = self.links[0]
        start = start_frame(plan)(0)
        first.open(lambda: self._transport.start(first.node.host, ["agent"]), start, threading.Semaphore())
        while not isinstance(self._events.get(timeout=_PATIENCE_S), MessageReceived):
            pass

    @property
    def sent(self) -> list[Message]:
        """What the first host was sent after its plan."""
        return self._transport.channels["here"].received[1:]

    def end(self) -> None:
        self.links[0].kill()
        self.links[0].close(time.monotonic() + _PATIENCE_S)


@contextmanager
def way(folder: Path) -> Generator[Way]:
    made = Way(folder)
    try:
        yield made
    finally:
        made.end()


def ctrl_c(*, at_once: bool = False) -> StopRequest:
    return StopRequest(UserStop(signal=signal.SIGINT, time_s=1.0), "SIGINT", at_once=at_once)


def test_the_first_failure_asks_those_that_have_begun_and_cancels_the_others(tmp_path: Path) -> None:
    with way(tmp_path) as down:
        assert not down.shutdown.has_begun
        for failure in ("rank 0 failed", "rank 1 failed"):
            down.shutdown.after_failure(failure)
        assert down.shutdown.has_begun
        assert down.sent == [Stop(signal=signal.SIGTERM)]
        assert down.cancelled == [down.links[1]]
        assert down.links[0].deadline_s is not None
        assert down.sink.notes == ["rank 0 failed; stopping 4 other ranks (grace 10.0s)"]


def test_a_person_asks_then_kills_then_leaves(tmp_path: Path) -> None:
    with way(tmp_path) as down:
        down.shutdown.on_request(ctrl_c())
        assert (down.sent, down.shutdown.is_left) == ([Stop(signal=signal.SIGINT)], False)
        down.shutdown.on_request(ctrl_c())
        assert (down.sent[1:], down.shutdown.is_left) == ([Kill()], False)
        down.shutdown.on_request(ctrl_c())
        assert (len(down.sent), down.shutdown.is_left) == (2, True)
        assert down.table.user_stop == ctrl_c().stop


def test_one_request_after_a_failure_kills(tmp_path: Path) -> None:
    with way(tmp_path) as down:
        down.shutdown.after_failure("rank 0 failed")
        down.shutdown.on_request(ctrl_c())
        assert down.sent == [Stop(signal=signal.SIGTERM), Kill()]


def test_who_wants_it_at_once_never_leaves(tmp_path: Path) -> None:
    with way(tmp_path) as down:
        for _ in range(3):
            down.shutdown.on_request(ctrl_c(at_once=True))
        assert (down.sent, down.shutdown.is_left) == ([Kill()], False)


def test_ranks_are_counted_in_words() -> None:
    assert [count_ranks(1), count_ranks(3, "other")] == ["1 rank", "3 other ranks"]
