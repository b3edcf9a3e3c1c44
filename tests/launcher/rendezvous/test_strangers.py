"""Strangers at the store are told from recorded tables, and nobody who may be of the job is ever taken for one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from ipaddress import ip_address

import pytest

from dsrun.launcher.rendezvous.strangers import (
    Connection,
    HostEnds,
    Stranger,
    StrangerJudge,
    StrangerWatch,
    own_addresses,
    read_connections,
    stranger_line,
)

little_endian = pytest.mark.skipif(sys.byteorder != "little", reason="recorded on little-endian machines")

#: As Linux 6.1 writes them; the store is at port 29500 (733C).
HEADER = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TCP = HEADER + (
    b"   0: 0A0012C6:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 7001 1 "
    b"0000000000000000 100 0 0 10 0                     \n"
    b"   1: 0A0012C6:733C 0B0012C6:C1A8 01 00000000:00000000 02:0000A1B2 00000000  1000        0 7002 2 "
    b"0000000000000000 20 4 30 10 -1                    \n"
    b"   2: 0A0012C6:733C 630012C6:E0F2 08 00000000:00000001 00:00000000 00000000     0        0 0 1 "
    b"0000000000000000 20 0 0 10 -1                     \n"
    b"   3: 0A0012C6:0016 0B0012C6:9D06 01 00000000:00000000 02:0000A1B2 00000000     0        0 7004 2 "
    b"0000000000000000 20 4 30 10 -1                    \n"
    b"   4: 0A0012C6:A0B2 0A0012C6:733C 01 00000000:00000000 02:0000A1B2 00000000  1001        0 7005 2 "
    b"0000000000000000 20 4 30 10 -1                    \n"
    b"   5: 0A0012C6:733C 630012C6:E0F0 06 00000000:00000000 03:00000B2D 00000000     0        0 0 3 0000000000000000\n"
)
TCP6 = HEADER + (
    b"   0: 5D5D5DFD015D5D5D00000000 :733C\n"  # torn
    b"   1: 5D5DFDFD00005D5D0000000010000000:733C 5D5DFDFD00005D5D0000000011000000:B0B0 01 00000000:00000000 "
    b"00:00000000 00000000  1000        0 8001 1 0000000000000000 20 4 30 10 -1\n"
    b"   2: 0000000000000000FFFF00000100007F:D431 0000000000000000FFFF00000100007F:733C 01 00000000:00000000 "
    b"00:00000000 00000000  1000        0 8002 1 0000000000000000 20 4 30 10 -1\n"
)


def connection(
    local: str, local_port: int, remote: str, remote_port: int, *, is_open: bool = True, user: int = 1000
) -> Connection:
    return Connection(ip_address(local), local_port, ip_address(remote), remote_port, is_open, user)


@little_endian
def test_connections_of_a_port_are_read_from_both_tables() -> None:
    assert read_connections(TCP, 29500) == [
        connection("198.18.0.10", 29500, "198.18.0.11", 0xC1A8),
        connection("198.18.0.10", 29500, "198.18.0.99", 0xE0F2, is_open=False, user=0),
        connection("198.18.0.10", 0xA0B2, "198.18.0.10", 29500, user=1001),
    ]
    assert read_connections(TCP6, 29500) == [
        connection("fdfd:5d5d:5d5d::10", 29500, "fdfd:5d5d:5d5d::11", 0xB0B0),
        connection("127.0.0.1", 0xD431, "127.0.0.1", 29500),
    ]
    assert read_connections(TCP, 0x7733) == []
    assert read_connections(b"", 29500) == []


STORE, PORT, ME, OTHER = "10.0.0.1", 29500, 1000, 1001


def from_here(*ports: int, user: int = ME, address: str = STORE) -> list[Connection]:
    """Connections of processes of the store's own host: both ends are there."""
    return [
        end
        for port in ports
        for end in (connection(STORE, PORT, address, port), connection(address, port, STORE, PORT, user=user))
    ]


def coming(address: str, *ports: int) -> list[Connection]:
    return [connection(STORE, PORT, address, port) for port in ports]


def judge(others: Sequence[HostEnds] | None = ()) -> StrangerJudge:
    """Of a job with two ranks on the store's host."""
    return StrangerJudge(STORE, PORT, HostEnds.of([STORE, "192.168.1.1"], 2), others=others, user=ME)


PEER = HostEnds.of(["10.0.0.2", "192.168.1.2"], 2)
#: The server of the store and both ranks; the ranks of the other host.
JOB = from_here(1, 2, 3)
PEERS = coming("10.0.0.2", 4, 5)


def test_who_comes_from_no_host_of_the_job_is_a_stranger_closed_or_not() -> None:
    assert judge([PEER]).judge([*JOB, *PEERS]) == []
    found = judge([PEER]).judge([*JOB, *PEERS, *coming("10.0.0.9", 6)])
    assert found == [Stranger(ip_address("10.0.0.9"), 6, None)]
    closed = connection(STORE, PORT, "10.0.0.9", 6, is_open=False, user=0)
    assert judge([PEER]).judge([*JOB, *PEERS, closed]) == [Stranger(ip_address("10.0.0.9"), 6, None)]


def test_another_users_process_of_this_host_is_a_stranger() -> None:
    assert judge().judge([*JOB, *from_here(7, user=OTHER)]) == [Stranger(ip_address(STORE), 7, OTHER)]


@pytest.mark.parametrize(
    ("others", "connections"),
    [
        pytest.param(None, [*JOB, *PEERS, *coming("10.0.0.9", 6)], id="the hosts are not known"),
        pytest.param([PEER], [*JOB, *coming("10.0.0.2", 4), *coming("10.0.0.9", 6)], id="a rank is not there yet"),
        pytest.param([PEER], [*JOB, *coming("10.0.0.254", 4, 5, 6)], id="addresses are translated"),
        pytest.param([PEER], [*from_here(1), *PEERS, *coming("172.17.0.2", 2, 3)], id="ranks in containers here"),
        pytest.param([PEER], [*JOB, *PEERS, *coming("192.168.1.2", 6)], id="another address of a host"),
        pytest.param((), [*from_here(1), *from_here(2, 3, user=0)], id="ranks as another user"),
        pytest.param((), [*JOB, connection(STORE, PORT, STORE, 9)], id="nobody knows whose process it is"),
        pytest.param(
            (),
            [*JOB, connection(STORE, PORT, STORE, 9), connection(STORE, 9, STORE, PORT, is_open=False, user=0)],
            id="closed by its process, and so without a user",
        ),
        pytest.param(
            [HostEnds.of([STORE], 2)], [*JOB, *from_here(4, 5, user=OTHER)], id="two hosts that are one machine"
        ),
        pytest.param((), [*JOB, connection("10.0.0.1", 2222, "10.0.0.9", PORT)], id="this host at another's port"),
        pytest.param((), [*JOB, connection("10.9.0.1", PORT, "10.0.0.9", 6)], id="the same port of another address"),
    ],
)
def test_nobody_is_told_who_may_be_of_the_job(others: Sequence[HostEnds] | None, connections: list[Connection]) -> None:
    assert judge(others).judge(connections) == []


def test_ranks_that_have_left_do_not_hide_a_stranger() -> None:
    judging = judge([PEER])
    assert judging.judge([*JOB, *PEERS]) == []
    assert judging.judge([*from_here(1), *coming("10.0.0.9", 6)]) == [Stranger(ip_address("10.0.0.9"), 6, None)]


def test_an_ipv6_host_may_change_its_address_in_its_network() -> None:
    store = "fd00:0:0:1::1"
    judging = StrangerJudge(store, PORT, HostEnds.of([store], 1), others=[HostEnds.of(["fd00:0:0:2::2"], 1)], user=ME)
    own = [
        end for port in (1, 2) for end in (connection(store, PORT, store, port), connection(store, port, store, PORT))
    ]
    comes = [connection(store, PORT, f"fd00:0:0:{last}", 9) for last in ("2::2", "2::77", "1::77", "3::77")]
    assert judging.judge([*own, *comes]) == [Stranger(ip_address("fd00:0:0:3::77"), 9, None)]


def test_the_line_says_who_what_and_what_helps() -> None:
    line = stranger_line(Stranger(ip_address("10.0.0.9"), 6, None), "10.0.0.1:29500")
    assert line == (
        "a connection from 10.0.0.9:6 to 10.0.0.1:29500, where the ranks meet, is from no host of this job; torch's "
        "store there asks nobody who they are, and whoever speaks its protocol can read and change what ranks tell "
        "each other: keep others out with a firewall, or meet on another network with `--iface`"
    )
    assert "a process of another user, root (0); " in stranger_line(Stranger(ip_address("127.0.0.1"), 6, 0), "h:1")
    assert "another user, 4321; " in stranger_line(Stranger(ip_address("127.0.0.1"), 6, 4321), "h:1")


def test_addresses_of_this_host_are_read_and_loopback_is_none_of_them() -> None:
    assert all(not ip_address(text).is_loopback for text in own_addresses())


KNOCK = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket() as connection:
    connection.connect(("127.0.0.1", int(sys.argv[1])))
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_connection_is_seen_by_the_kernels_own_tables_and_told_once() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        told: list[str] = []
        watch = StrangerWatch("127.0.0.1", port, 1, others=(), tell=told.append)
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        watch.look(0)
        assert told == []
        knocking = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", KNOCK, str(port), "4321"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        assert knocking.stdout is not None
        assert knocking.stdout.readline() == b"there\n"
        # Far apart, whatever a look has cost.
        for now_s in (1000, 2000):
            watch.look(now_s)
        assert len(told) == 1
        assert "a process of another user, 4321" in told[0]
