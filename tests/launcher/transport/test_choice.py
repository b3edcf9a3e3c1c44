from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
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
    ("name", "way"),
    [
        ("ssh", "ssh.connection.SshTransport"),
        ("openssh", "ssh.openssh.OpensshTransport"),
        ("srun", "srun.SrunTransport"),
    ],
)
@pytest.mark.parametrize("start_timeout_s", [None, 300.0])
def test_the_time_to_start_reaches_every_way_that_waits(
    name: TransportName, way: str, start_timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def record(**settings: object) -> LocalTransport:
        given.update(settings)
        return LocalTransport()

    monkeypatch.setattr(f"dsrun.launcher.transport.{way}", record)
    make_transport(name, ReachSettings(lease_s=15, start_timeout_s=start_timeout_s))
    assert given["start_patience_s"] == (start_timeout_s or (60.0 if name == "srun" else 20.0))


@pytest.mark.parametrize(("name", "client"), [("openssh", "ssh"), ("srun", "srun")])
def test_a_host_that_does_not_start_the_command_in_time_is_told_with_the_way_out(
    name: TransportName, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / client
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("dsrun.launcher.transport.srun._PLACE_PATIENCE_S", 0)
    settings = ReachSettings(lease_s=15, connect_timeout_s=0.1, start_timeout_s=0.1)
    with pytest.raises(LaunchError) as raised:
        make_transport(name, settings).start(host("w1"), ["true"])
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("; `--start-timeout 2m` waits longer")


@pytest.mark.parametrize(
    ("connect_s", "start_s", "expected_s"), [(None, None, 60.0), (1, 1, 60.0), (300, None, 340.0), (None, 120, 248.0)]
)
def test_the_first_word_is_waited_for_as_long_as_the_steps_to_it_may_take(
    connect_s: float | None, start_s: float | None, expected_s: float
) -> None:
    settings = ReachSettings(lease_s=15, connect_timeout_s=connect_s, start_timeout_s=start_s)
    assert settings.first_word_s == expected_s


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
