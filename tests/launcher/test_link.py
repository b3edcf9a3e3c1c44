"""One host's channel as the front end sees it: how its end is told, and whether the host is still in touch."""

from __future__ import annotations

import queue
import threading

import pytest

from dsrun.launcher.hosts import HostSpec
from dsrun.launcher.link import Ended, Link, LinkEvent, Received
from dsrun.launcher.plan import NodePlan
from dsrun.launcher.protocol import Finished
from dsrun.launcher.transport.base import CONNECTION_LOST
from dsrun.launcher.transport.fake import Die, FakeTransport, Step

_PATIENCE_S = 20.0


def end_of(*script: Step) -> tuple[Link, Ended]:
    """Opens a link to an agent with this script and reads it to its end."""
    host = HostSpec(name="box", slots=1, source="test")
    events: queue.Queue[LinkEvent] = queue.Queue()
    link = Link(NodePlan(host=host, node_rank=0, workers=()), events.put, room=8, lease_s=15)
    transport = FakeTransport({"box": script})
    link.open(lambda: transport.start(host, ["agent"]), [b'{"type":"start"}\n'], threading.Semaphore())
    while True:
        event = events.get(timeout=_PATIENCE_S)
        if isinstance(event, Received):
            link.handled()
        if isinstance(event, Ended):
            return link, event


@pytest.mark.parametrize(
    ("status", "reason", "out_of_touch"),
    [
        (CONNECTION_LOST, "the connection to its agent was lost", True),
        (-9, "the agent was killed by SIGKILL unexpectedly", False),
        (1, "the agent exited with code 1 unexpectedly", False),
    ],
)
def test_an_end_is_told_in_words(status: int, reason: str, out_of_touch: bool) -> None:
    link, ended = end_of(Finished(unkillable=[]), Die(status))
    assert ended.reason == reason
    assert link.is_out_of_touch is out_of_touch


def test_what_cannot_be_understood_is_told_rather_than_the_status() -> None:
    link, ended = end_of(b"not a frame\n", Die(CONNECTION_LOST))
    assert "lost" not in ended.reason
    assert not link.is_out_of_touch
