"""Both ways of ssh on bad lines: slow, cut for a moment or for good; and what becomes of connections that were used."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.base import CONNECTION_LOST, Channel
from dsrun.launcher.transport.ssh.connection import SshTransport
from support.channels import ECHO, MakeTransport, RememberingChannels, read_all, start_python
from support.namespaces import NetHost, Rig, hosts, why_no_hosts
from support.relay import relay

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(90)]

_PATIENCE_S = 20.0
#: Round trips of 0.4 s, as far as a line on this planet gets.
_DELAY_S = 0.2


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(1, tmp_path_factory.mktemp("rig")) as made:
        yield made


@pytest.fixture
def n1(rig: Rig) -> NetHost:
    return rig.hosts[0]


def logins(host: NetHost) -> int:
    """How many have logged in since the server was started."""
    return host.sshd.log.count("Accepted publickey")


# --- slow lines


def test_a_session_over_a_line_of_200_ms_loses_no_byte(
    make_transport: MakeTransport, rig: Rig, n1: NetHost, tmp_path: Path
) -> None:
    data = bytes(range(256)) * 4096  # 1 MiB
    with relay((n1.address, 22), delay_s=_DELAY_S) as line:
        known = tmp_path / "known"
        known.write_text(f"[{line.address}]:{line.port} {n1.sshd.public_key}\n")
        config = tmp_path / "ssh_config"
        config.write_text(rig.ssh_config.read_text().replace(str(rig.known_hosts), str(known)))
        transport = make_transport(config=config, connect_timeout_s=30)
        spec = HostSpec(name="far", slots=1, source="test", addr=line.address, port=line.port)
        began_s = time.monotonic()
        channel = transport.start(spec, ["cat"])
        assert time.monotonic() - began_s > 5 * _DELAY_S, "the line is slow"
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(read_all(channel.read_stdout)))
        reader.start()
        channel.send(data)
        channel.end_input()
        reader.join(2 * _PATIENCE_S)
        assert got == [data]
        assert channel.wait(_PATIENCE_S) == 0
        # Before the line is cut.
        channel.kill()


# --- cut lines


def test_a_partition_of_three_seconds_ends_nothing_and_loses_nothing(
    make_transport: MakeTransport, rig: Rig, n1: NetHost
) -> None:
    # A lease of 6 s has a keepalive in each 2 s, so that one falls into the gap.
    channel = make_transport(config=rig.ssh_config, lease_s=6).start(n1.spec(), ["cat"])
    channel.send(b"before,")
    assert channel.read_stdout() == b"before,"
    rig.partition(rig.front, n1)
    try:
        channel.send(b"in between,")
        assert channel.wait(3) is None
    finally:
        rig.heal(rig.front, n1)
    channel.send(b"after")
    channel.end_input()
    assert read_all(channel.read_stdout) == b"in between,after"
    assert channel.wait(_PATIENCE_S) == 0


def test_a_connection_that_breaks_is_told_as_lost_and_the_command_sees_its_end(
    make_transport: MakeTransport, rig: Rig, n1: NetHost, tmp_path: Path
) -> None:
    seen = rig.folder / f"seen-{tmp_path.name}"
    source = f"import sys; print('up', flush=True); sys.stdin.read(); open({str(seen)!r}, 'w').close()"
    channel = start_python(make_transport(config=rig.ssh_config), n1, source)
    assert channel.read_stdout() == b"up\n"
    n1.sshd.cut()
    assert read_all(channel.read_stdout) == b""
    assert channel.wait(_PATIENCE_S) == CONNECTION_LOST
    deadline_s = time.monotonic() + _PATIENCE_S
    while not seen.exists():
        assert time.monotonic() < deadline_s, "the command was told of the end"
        threading.Event().wait(0.01)


# --- connections that were used (the system's client has one each)


@pytest.fixture
def transport(rig: Rig) -> Iterator[SshTransport]:
    made = SshTransport(lease_s=15, config=rig.ssh_config)
    yield made
    made.close()


@pytest.fixture
def channels(transport: SshTransport) -> Iterator[RememberingChannels]:
    made = RememberingChannels(transport)
    yield made
    made.end_all()


def run_true(channels: RememberingChannels, host: NetHost) -> Channel:
    channel = start_python(channels, host, "print('done')")
    assert read_all(channel.read_stdout) == b"done\n"
    assert channel.wait(_PATIENCE_S) == 0
    return channel


def until_it_is_free(channels: RememberingChannels, host: NetHost, first: Channel) -> Channel:
    """Starts commands until one has the connection of the first, whose server closes it a moment after its end."""
    assert first.wait(_PATIENCE_S) == 0
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        before = logins(host)
        channel = start_python(channels, host, ECHO)
        if logins(host) == before:
            return channel
    raise AssertionError("a connection that was used is used again")


def test_a_host_s_next_command_needs_no_login(channels: RememberingChannels, n1: NetHost) -> None:
    channel = until_it_is_free(channels, n1, run_true(channels, n1))
    channel.send(b"hello")
    channel.end_input()
    assert read_all(channel.read_stdout) == b"hello"
    assert channel.wait(_PATIENCE_S) == 0


def test_commands_that_run_at_once_have_a_connection_each(channels: RememberingChannels, n1: NetHost) -> None:
    before = logins(n1)
    one, other = start_python(channels, n1, ECHO), start_python(channels, n1, ECHO)
    assert logins(n1) == before + 2
    one.kill()
    other.send(b"still here")
    other.end_input()
    assert read_all(other.read_stdout) == b"still here"
    assert other.wait(_PATIENCE_S) == 0


def test_to_kill_an_ended_command_harms_none_that_has_its_connection(
    channels: RememberingChannels, n1: NetHost
) -> None:
    first = run_true(channels, n1)
    channel = until_it_is_free(channels, n1, first)
    first.kill()
    channel.send(b"still here")
    channel.end_input()
    assert read_all(channel.read_stdout) == b"still here"
    assert first.wait(0) == 0


def test_a_connection_that_was_lost_meanwhile_is_replaced(channels: RememberingChannels, n1: NetHost) -> None:
    run_true(channels, n1)
    n1.sshd.cut()
    run_true(channels, n1)


def test_another_user_or_port_has_another_connection(channels: RememberingChannels, rig: Rig, n1: NetHost) -> None:
    run_true(channels, n1)
    before = logins(n1)
    spec = HostSpec(name=n1.name, slots=1, source="test", addr=n1.address, user="root", port=22)
    assert read_all(channels.start(spec, ["hostname"]).read_stdout) == b"n1\n"
    assert logins(n1) == before + 1


def test_a_closed_transport_has_kept_no_connection(
    transport: SshTransport, channels: RememberingChannels, n1: NetHost
) -> None:
    channel = until_it_is_free(channels, n1, run_true(channels, n1))
    channel.end_input()
    assert channel.wait(_PATIENCE_S) == 0
    transport.close()
    before = logins(n1)
    run_true(channels, n1)
    assert logins(n1) == before + 1
