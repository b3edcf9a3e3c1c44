"""One host's channel as the front end sees it: how its end is told, and whether the host is still in touch."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.plan.launch_plan import GpuPlace, LaunchPlan, NodePlan
from dsrun.launcher.protocol import Finished, Start, decode
from dsrun.launcher.session.agent_link import ChannelEnd, Link, LinkEvent, MessageReceived, Said, start_frame
from dsrun.launcher.transport.base import CONNECTION_LOST, Channel
from dsrun.launcher.transport.fake import Die, FakeTransport, Step
from dsrun.launcher.transport.local import LocalTransport
from support.jobs import program_plan

_PATIENCE_S = 20.0


_BOX = HostSpec(name="box", slots=1, source="test")
#: What torch's store says on the host of rank 0, and something that counts.
_NAMELESS = "[W1121 14:50:07.65 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
_FAULT = "[E1121 14:50:07.66 TCPStore.cpp:1] out of descriptors"


def end_of(*script: Step) -> tuple[Link, ChannelEnd]:
    """Opens a link to an agent with this script and reads it to its end."""
    link, _, ended = read_to_end(lambda: FakeTransport({"box": script}).start(_BOX, ["agent"]))
    return link, ended


def read_to_end(connect: Callable[[], Channel]) -> tuple[Link, list[str], ChannelEnd]:
    """Opens a link and reads it to its end; returns it, the lines of stderr, and the end."""
    events: queue.Queue[LinkEvent] = queue.Queue()
    link = Link(NodePlan(host=_BOX, node_rank=0, workers=()), events.put, room=8, lease_s=15)
    link.open(connect, [b'{"type":"start"}\n'], threading.Semaphore())
    said: list[str] = []
    while True:
        match events.get(timeout=_PATIENCE_S):
            case MessageReceived():
                link.handled()
            case Said(line=line):
                said.append(line)
                link.handled()
            case ChannelEnd() as ended:
                link.end_input()
                return link, said, ended
            case _:
                pass


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


def test_torch_that_finds_no_name_for_a_rank_is_no_word_of_the_agent() -> None:
    program = f"import sys; sys.stderr.write({_NAMELESS!r} + chr(10) + {_FAULT!r} + chr(10)); sys.exit(3)"
    _, said, ended = read_to_end(lambda: LocalTransport().start(_BOX, [sys.executable, "-c", program]))
    assert said == [_FAULT]
    assert (ended.reason, list(ended.last_lines)) == ("the agent exited with code 3 unexpectedly", [_FAULT])


def test_each_host_is_told_of_its_own_gpus_alone(tmp_path: Path) -> None:
    places = {
        f"n{host}": tuple(GpuPlace(uuid=f"GPU-{host}{number}", address="0000:17:00.0") for number in range(8))
        for host in range(3)
    }
    plan = program_plan(tmp_path, "command", "true", hosts=3)
    plan = plan.with_gpus({node.host.name: its for node, its in zip(plan.nodes, places.values(), strict=True)})
    # What is equal for all is sent as it is, whatever the config says.
    frame = start_frame(plan, config='{"node_rank":0,"gpus":[]}')
    for host in range(3):
        start = decode(b"".join(frame(host)))
        assert isinstance(start, Start)
        assert (start.node_rank, start.config) == (host, '{"node_rank":0,"gpus":[]}')
        assert tuple(GpuPlace(**gpu) for gpu in start.gpus) == plan.nodes[host].gpus
        assert all(node.gpus == () for node in LaunchPlan.from_json(start.plan).nodes)
