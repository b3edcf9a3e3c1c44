from __future__ import annotations

import pytest

from dsrun.launcher.hosts import HostSpec
from dsrun.launcher.transport.choice import TRANSPORTS, ReachSettings, TransportName, describe_reach, make_transport
from dsrun.launcher.transport.local import LocalChannel, LocalTransport

SETTINGS = ReachSettings(lease_s=15)


def host(name: str, **more: object) -> HostSpec:
    return HostSpec(name=name, slots=1, source="hosts:1", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_name_is_a_way(name: TransportName) -> None:
    assert isinstance(make_transport(name, SETTINGS), LocalTransport) == (name == "local")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_is_for_this_machine_is_started_without_a_connection(name: TransportName) -> None:
    channel = make_transport(name, SETTINGS, local_hosts=["here"]).start(host("here"), ["echo", "started"])
    assert isinstance(channel, LocalChannel)
    assert channel.read_stdout() == b"started\n"
    assert channel.wait(10) == 0
    channel.end_input()
    assert channel.read_stdout() + channel.read_stderr() == b""


@pytest.mark.parametrize(
    ("asked", "name", "is_local", "told"),
    [
        (host("w1"), "ssh", False, "ssh w1"),
        (host("w1", user="ada", addr="10.0.0.4", port=2222), "openssh", False, "openssh ada@10.0.0.4 port 2222"),
        (host("w1"), "srun", False, "srun"),
        (host("w1"), "ssh", True, "here"),
        (host("w1"), "local", False, "here"),
    ],
)
def test_the_way_is_told_in_words(asked: HostSpec, name: TransportName, is_local: bool, told: str) -> None:
    assert describe_reach(asked, name, is_local=is_local) == told
