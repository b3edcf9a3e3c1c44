"""Hosts find together at node 0: late ones are waited for, strangers are turned away, and all go at once."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.plan.launch_plan import Outside
from dsrun.launcher.rendezvous.static_node0 import await_hosts
from dsrun.launcher.rendezvous.static_nodes import Presence, join_hosts, shared_nonce
from support.jobs import program_plan

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 40.0


def host(number: int, *, count: int = 3, job: str = "j", slots: int = 2) -> Presence:
    return Presence(job=job, node_rank=number, node_count=count, slots=slots, name=f"n{number}")


def test_all_hosts_have_the_word_that_they_were_given_or_derive_the_same(tmp_path: Path) -> None:
    plans = [
        program_plan(tmp_path, "command", "true", *words, outside=Outside(node_rank=number, node_count=2, port=port))
        for number, port, words in ((0, 5, ["a"]), (1, 5, ["a"]), (1, 6, ["a"]), (1, 5, ["b"]))
    ]
    first, second, *others = (shared_nonce(plan, {}) for plan in plans)
    assert first == second
    assert len({first, *others}) == 3
    assert shared_nonce(plans[0], {"DSRUN_NONCE": "given"}) == "given"
    inside_a_rank = {"DSRUN_NONCE": "of the outer job", "DSRUN_JOB_ID": "outer"}
    assert shared_nonce(plans[0], inside_a_rank) == first


class Running:
    """One host's part on a thread; ends as `None`, or with its error."""

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[LaunchError | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[Callable[[str], None]], None]) -> None:
        try:
            work(self.notes.put)
        except LaunchError as error:
            self._ends.put(error)
        else:
            self._ends.put(None)

    def end(self) -> LaunchError | None:
        return self._ends.get(timeout=PATIENCE_S)

    @property
    def goes_on(self) -> bool:
        return self._ends.empty()


@pytest.fixture
def listener() -> Generator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def waiting(listener: socket.socket, *, count: int = 3, patience_s: float = PATIENCE_S) -> Running:
    until_s = time.monotonic() + patience_s
    return Running(lambda tell: await_hosts(listener, host(0, count=count), until_s=until_s, tell=tell))


def coming(listener: socket.socket | int, me: Presence, *, patience_s: float = PATIENCE_S) -> Running:
    port = listener if isinstance(listener, int) else listener.getsockname()[1]
    until_s = time.monotonic() + patience_s
    return Running(lambda tell: join_hosts("127.0.0.1", port, me, until_s=until_s, tell=tell))


def test_a_host_alone_waits_for_nobody(listener: socket.socket) -> None:
    assert waiting(listener, count=1).end() is None


def test_nobody_goes_before_all_are_there_and_then_all_do(listener: socket.socket) -> None:
    first, second = waiting(listener), coming(listener, host(2))
    assert "waiting for node" in first.notes.get(timeout=PATIENCE_S)
    assert second.notes.get(timeout=PATIENCE_S).endswith("waits for other nodes")
    assert first.goes_on
    assert second.goes_on
    third = coming(listener, host(1))
    assert [one.end() for one in (first, second, third)] == [None, None, None]
    assert listener.getblocking(), "whoever serves the store takes the socket over as it was made"


def test_whoever_is_early_waits_for_host_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    early = coming(port, host(1, count=2))
    assert early.notes.get(timeout=PATIENCE_S) == f"waiting for node 0 at 127.0.0.1:{port}: connection refused"
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert waiting(listener, count=2).end() is None
        assert early.end() is None


@pytest.mark.depends_on_speed("a host has 1 s to come")
def test_hosts_that_do_not_come_are_named_and_the_others_told(listener: socket.socket) -> None:
    second = coming(listener, host(2, count=4))
    first = waiting(listener, count=4, patience_s=1.0)
    error = first.end()
    assert str(error) == "nodes 1, 3 of 4 did not come in time"
    assert "nodes 1, 3 of 4 did not come in time" in str(second.end())


def test_a_host_0_that_never_comes_is_named_with_what_was_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    error = coming(port, host(1), patience_s=0.2).end()
    assert str(error) == f"node 0 did not let all go in time at 127.0.0.1:{port}: connection refused"


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (host(1, job="other"), "another job's nodes gather there"),
        (host(1, count=4), "node 0 counts 3 nodes with 2 ranks each, this one 4 with 2"),
        (host(1, slots=1), "node 0 counts 3 nodes with 2 ranks each, this one 3 with 1"),
        (host(0), "there is no node 0 of 3"),
    ],
    ids=["job", "hosts", "ranks", "number"],
)
def test_who_does_not_belong_is_turned_away_with_the_reason(
    listener: socket.socket, stranger: Presence, reason: str
) -> None:
    first = waiting(listener)
    assert str(coming(listener, stranger).end()) == f"node 0 does not let this one in: {reason}"
    assert first.goes_on
    ends = [coming(listener, host(number)) for number in (1, 2)]
    assert [one.end() for one in (first, *ends)] == [None, None, None]


def test_two_hosts_of_one_number_are_no_two_hosts(listener: socket.socket) -> None:
    first, one = waiting(listener), coming(listener, host(1))
    assert one.notes.get(timeout=PATIENCE_S)
    twin = coming(listener, replace(host(1), name="twin"), patience_s=0.2)
    assert str(twin.end()).endswith("node 1 is there already: n1")
    assert [coming(listener, host(2)).end(), first.end(), one.end()] == [None, None, None]


def test_a_host_that_came_back_takes_its_place_once_its_old_connection_is_seen_to_end(listener: socket.socket) -> None:
    first = waiting(listener)
    address = listener.getsockname()
    with socket.create_connection(address) as old:
        old.sendall(json.dumps(asdict(host(1))).encode() + b"\n")
        back = coming(listener, host(1))
        assert "node 1 is there already: n1" in back.notes.get(timeout=PATIENCE_S)
    assert [coming(listener, host(2)).end(), first.end(), back.end()] == [None, None, None]


def test_a_host_that_leaves_is_waited_for_again(listener: socket.socket) -> None:
    first = waiting(listener, count=2)
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as hasty:
        hasty.sendall(b'{"job": "j", "node_rank": 1,')
    assert first.goes_on
    assert coming(listener, host(1, count=2)).end() is None
    assert first.end() is None


@pytest.mark.parametrize(
    "noise",
    [b"\0" * 100_000, b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"job": 1, "node_rank": true}\n', b"[" * 4000 + b"\n", b""],
    ids=["zeros", "http", "empty", "types", "deep", "nothing"],
)
def test_noise_on_the_port_changes_nothing(listener: socket.socket, noise: bytes) -> None:
    first = waiting(listener, count=2)
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as stranger:
        try:
            stranger.sendall(noise)
        except OSError:
            assert len(noise) > 4096, "it was turned away in the middle"
        second = coming(listener, host(1, count=2))
        assert [first.end(), second.end()] == [None, None]


def test_what_is_no_dsrun_is_named(listener: socket.socket) -> None:
    second = coming(listener, host(1))
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        assert str(second.end()) == "node 0 does not let this one in: what listens there is no dsrun"


def test_a_stranger_is_told_once_by_its_address(listener: socket.socket) -> None:
    first = waiting(listener, count=2)
    ports: list[int] = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as stranger:
            ports.append(stranger.getsockname()[1])
            stranger.sendall(b"GET / HTTP/1.0\n")
            assert stranger.recv(4096)
    line = f"a connection from 127.0.0.1:{ports[0]} to the rendezvous port was refused: it is none of dsrun's"
    assert first.notes.get(timeout=PATIENCE_S) == line
    assert first.notes.empty()
    assert coming(listener, host(1, count=2)).end() is None
    assert first.end() is None
