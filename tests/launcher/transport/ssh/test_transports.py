"""Both ways of ssh against real servers, on hosts made of namespaces: bytes, ends, faults on the way, keys."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.base import Channel, Transport
from support.channels import ECHO, MakeTransport, fault_of, read_all, start_python
from support.namespaces import NetHost, Rig, hosts, why_no_hosts
from support.sshd import make_key

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(60)]

#: Far above what anything here takes, far below what a hang would.
_PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        yield made


@pytest.fixture
def transport(make_transport: MakeTransport, rig: Rig) -> Transport:
    return make_transport(config=rig.ssh_config)


@pytest.fixture
def n2(rig: Rig) -> Generator[NetHost]:
    """The second host, whose server a test may stop and start as it likes."""
    host = rig.hosts[1]
    key = host.sshd.public_key
    yield host
    host.sshd.stop()
    assert host.sshd.public_key == key, "a test that changes the host key makes a rig of its own"
    host.sshd.start()


# --- bytes


def test_any_bytes_make_the_round_trip(transport: Transport, rig: Rig) -> None:
    data = bytes(range(256)) * 4096  # 1 MiB
    channel = start_python(transport, rig.hosts[0], ECHO)
    reader_got: list[bytes] = []
    reader = threading.Thread(target=lambda: reader_got.append(read_all(channel.read_stdout)))
    reader.start()
    channel.send(data)
    channel.end_input()
    channel.end_input()
    reader.join(_PATIENCE_S)
    assert reader_got == [data]
    assert channel.wait(_PATIENCE_S) == 0
    assert channel.read_stdout() == b""
    assert channel.read_stderr() == b""


def test_words_arrive_as_identical_bytes(transport: Transport, rig: Rig) -> None:
    words = [
        "", " ", "a b", "'", '"', "'\"'", "$HOME", "$(id)", "`id`", ";", "&&", "|", ">x", "*", "~", "\\", "\\n", "a\nb",
        "-oProxyCommand=id", "--", "!", "#", "é漢", "\udcff\udc80", "\t", "%h", "{1,2}",
    ]  # fmt: skip
    source = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(word) for word in sys.argv[1:]))"
    channel = start_python(transport, rig.hosts[0], source, *words)
    assert read_all(channel.read_stdout) == b"\0".join(word.encode(errors="surrogateescape") for word in words)
    assert channel.wait(_PATIENCE_S) == 0


@pytest.mark.parametrize("argv", [["-oProxyCommand=id"], ["echo", "a\0b"]], ids=["dash", "nul"])
def test_a_command_that_cannot_be_said_is_refused(transport: Transport, rig: Rig, argv: list[str]) -> None:
    with pytest.raises(LaunchError, match="host n1: "):
        transport.start(rig.hosts[0].spec(), argv)


def test_stdout_and_stderr_stay_apart(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], "import sys; print('out'); print('err', file=sys.stderr)")
    assert read_all(channel.read_stdout) == b"out\n"
    assert read_all(channel.read_stderr) == b"err\n"


def test_a_command_whose_output_nobody_reads_is_held_up(transport: Transport, rig: Rig, tmp_path: Path) -> None:
    # More than pipes, windows and socket buffers hold together.
    size, piece = 64 << 20, 1 << 16
    progress = rig.folder / f"progress-{tmp_path.name}"
    progress.write_bytes(b"")
    source = (
        "import sys\n"
        f"with open({str(progress)!r}, 'ab', buffering=0) as progress:\n"
        f"    for _ in range({size // piece}):\n"
        f"        sys.stdout.buffer.write(bytes({piece})); sys.stdout.buffer.flush()\n"
        "        progress.write(b'.')\n"
    )
    channel = start_python(transport, rig.hosts[0], source)
    # It has stopped once nothing was written for a while; it would write all within that time.
    written, still_s, deadline_s = -1, 0.0, time.monotonic() + _PATIENCE_S
    while still_s < 1 and time.monotonic() < deadline_s:
        before, written = written, progress.stat().st_size
        still_s = still_s + 0.1 if before == written else 0.0
        assert channel.wait(0.1) is None
    assert 0 < written < size // piece
    got = 0
    while data := channel.read_stdout():
        got += len(data)
    assert got == size
    assert channel.wait(_PATIENCE_S) == 0


def test_an_ipv6_address_is_reached(transport: Transport, rig: Rig) -> None:
    address6 = rig.hosts[0].address6
    if address6 is None:
        pytest.skip("the kernel has no IPv6")
    channel = start_python(transport, rig.hosts[0], "import socket; print(socket.gethostname())", addr=address6)
    assert read_all(channel.read_stdout) == b"n1\n"


# --- ends


def test_the_exit_status_is_the_command_s(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], "raise SystemExit(3)")
    assert channel.wait(_PATIENCE_S) == 3


def test_a_signal_is_told_as_one(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert channel.wait(_PATIENCE_S) == -signal.SIGKILL


def test_waiting_for_a_command_that_lives_returns_none(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], ECHO)
    assert channel.wait(0.05) is None
    channel.kill()
    assert channel.wait(_PATIENCE_S) is not None


@pytest.mark.parametrize("end", ["end_input", "kill"])
def test_the_command_sees_the_end_of_its_stdin(transport: Transport, rig: Rig, tmp_path: Path, end: str) -> None:
    seen = rig.folder / f"seen-{tmp_path.name}"
    source = f"import sys; print('up', flush=True); sys.stdin.buffer.read(); open({str(seen)!r}, 'w').close()"
    channel = start_python(transport, rig.hosts[0], source)
    assert channel.read_stdout() == b"up\n"
    assert not seen.exists()
    getattr(channel, end)()
    deadline_s = time.monotonic() + _PATIENCE_S
    while not seen.exists():
        assert time.monotonic() < deadline_s, "the command was told of the end"
        threading.Event().wait(0.01)
    assert channel.wait(_PATIENCE_S) is not None
    assert channel.read_stdout() == b""
    assert channel.read_stderr() == b""


def test_a_blocked_read_ends_with_the_channel(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], ECHO)
    got: list[bytes] = []

    def read_by(read: Callable[[], bytes]) -> None:
        got.append(read())

    readers = [threading.Thread(target=read_by, args=(read,)) for read in (channel.read_stdout, channel.read_stderr)]
    for reader in readers:
        reader.start()
    channel.kill()
    for reader in readers:
        reader.join(_PATIENCE_S)
    assert got == [b"", b""]


def test_sending_to_a_command_that_has_ended_is_an_os_error(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], "")
    assert channel.wait(_PATIENCE_S) == 0
    read_all(channel.read_stdout)
    with pytest.raises(OSError):
        channel.send(b"x")


def test_sending_after_a_known_status_is_an_os_error_though_a_child_has_the_pipes(
    transport: Transport, rig: Rig
) -> None:
    source = "import os, sys; os.fork() or sys.stdin.buffer.read()"
    channel = start_python(transport, rig.hosts[0], source)
    if channel.wait(1) is None:
        # The system's client tells no status before the last has closed the pipes.
        channel.end_input()
        assert channel.wait(_PATIENCE_S) == 0
    with pytest.raises(OSError):
        channel.send(b"x")


def test_sending_after_the_end_of_the_input_is_an_os_error(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], "import sys; print(); sys.stdin.buffer.read()")
    channel.end_input()
    with pytest.raises(OSError):
        channel.send(b"x")


def test_a_channel_into_a_partition_can_be_killed(transport: Transport, rig: Rig) -> None:
    channel = start_python(transport, rig.hosts[0], ECHO)
    rig.partition(rig.front, rig.hosts[0])
    try:
        # More than the buffers on this side hold: the sender blocks.
        blocked = threading.Thread(target=lambda: _send_until_gone(channel), daemon=True)
        blocked.start()
        assert channel.wait(0.2) is None
        channel.kill()
        assert channel.wait(_PATIENCE_S) is not None
        blocked.join(_PATIENCE_S)
        assert not blocked.is_alive()
    finally:
        rig.heal(rig.front, rig.hosts[0])


def _send_until_gone(channel: Channel) -> None:
    try:
        while True:
            channel.send(bytes(1 << 20))
    except OSError:
        return


def test_a_server_that_is_killed_leaves_its_connections(transport: Transport, n2: NetHost) -> None:
    channel = start_python(transport, n2, ECHO)
    n2.sshd.stop()
    channel.send(b"still here\n")
    channel.end_input()
    assert read_all(channel.read_stdout) == b"still here\n"
    assert channel.wait(_PATIENCE_S) == 0


# --- on the way


def test_a_missing_interpreter_is_named(transport: Transport, rig: Rig) -> None:
    with pytest.raises(LaunchError, match=r"host n1: cannot run '/no/python': there is no such program") as caught:
        transport.start(rig.hosts[0].spec(), ["/no/python", "-c", ""])
    assert "python=" in str(caught.value.hint)


def test_a_closed_port_is_told_when_the_connect_timeout_is_over(
    make_transport: MakeTransport, rig: Rig, n2: NetHost
) -> None:
    n2.sshd.stop()
    said: list[str] = []
    transport = make_transport(connect_timeout_s=3.5, config=rig.ssh_config, note=said.append)
    assert "connection refused" in str(fault_of(transport, n2.spec()))
    # Once only, however often it is knocked at.
    assert len(said) == 1
    assert said[0].startswith("host n2: no ssh server listens at")
    assert "trying again" in said[0]


def test_a_server_that_starts_late_is_waited_for(make_transport: MakeTransport, rig: Rig, n2: NetHost) -> None:
    n2.sshd.stop()
    said: list[str] = []
    transport = make_transport(connect_timeout_s=_PATIENCE_S, config=rig.ssh_config, note=said.append)
    got: list[bytes] = []
    waiting = threading.Thread(
        target=lambda: got.append(read_all(transport.start(n2.spec(), ["hostname"]).read_stdout))
    )
    waiting.start()
    deadline_s = time.monotonic() + _PATIENCE_S
    while not said:
        assert time.monotonic() < deadline_s, "the wait is announced"
        waiting.join(0.05)
    assert got == []
    n2.sshd.start()
    waiting.join(_PATIENCE_S)
    assert got == [b"n2\n"]
    assert len(said) == 1


@pytest.mark.depends_on_speed("12 logins within 30 s")
def test_many_at_once_get_through_to_a_server_that_drops_connections(
    make_transport: MakeTransport, rig: Rig, n2: NetHost
) -> None:
    n2.sshd.stop()
    # Of those that have not logged in yet: from the second on, half; from the fifth on, all.
    n2.sshd.start({"MaxStartups": "2:50:5"})
    transport = make_transport(connect_timeout_s=30, config=rig.ssh_config)
    names: list[bytes] = []
    faults: list[LaunchError] = []

    def work() -> None:
        try:
            names.append(read_all(transport.start(n2.spec(), ["hostname"]).read_stdout))
        except LaunchError as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert faults == []
    assert names == [b"n2\n"] * 12
    assert "drop connection" in n2.sshd.log


def test_a_black_hole_is_given_up_after_the_connect_timeout(make_transport: MakeTransport, rig: Rig) -> None:
    rig.partition(rig.front, rig.hosts[0])
    try:
        transport = make_transport(connect_timeout_s=1, config=rig.ssh_config)
        assert "no answer" in str(fault_of(transport, rig.hosts[0].spec()))
    finally:
        rig.heal(rig.front, rig.hosts[0])


def test_a_server_that_never_says_a_word_is_given_up(make_transport: MakeTransport, rig: Rig) -> None:
    with socket.create_server((rig.front.address, 0)) as silent:
        transport = make_transport(connect_timeout_s=1, config=rig.ssh_config)
        port = silent.getsockname()[1]
        spec = HostSpec(name="silent", slots=1, source="test", addr=rig.front.address, port=port)
        assert f"no answer from {rig.front.address} port {port} within 1 s" in str(fault_of(transport, spec))


def test_an_unknown_name_is_named(transport: Transport) -> None:
    fault = fault_of(transport, HostSpec(name="no-such-host.invalid", slots=1, source="test"))
    assert "'no-such-host.invalid' has no address" in str(fault)


def test_a_login_shell_that_does_not_start_it_is_told(transport: Transport, n2: NetHost) -> None:
    n2.sshd.stop()
    n2.sshd.start({"ForceCommand": "echo go away; exit 7"})
    fault = fault_of(transport, n2.spec())
    assert "ended with 7" in str(fault)
    assert "go away" in str(fault)


def test_what_is_printed_before_the_command_is_no_part_of_it(
    transport: Transport, n2: NetHost, tmp_path: Path, rig: Rig
) -> None:
    banner = rig.folder / f"banner-{tmp_path.name}"
    banner.write_text("Welcome.\n")
    n2.sshd.stop()
    n2.sshd.start(
        {"Banner": str(banner), "ForceCommand": 'echo noise; echo noise >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"'}
    )
    channel = start_python(transport, n2, "print('out')")
    assert read_all(channel.read_stdout) == b"out\n"
    assert read_all(channel.read_stderr) == b""


# --- who is who


def test_a_wrong_key_is_not_let_in(make_transport: MakeTransport, rig: Rig, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    config = rig.folder / f"config-{tmp_path.name}"
    config.write_text(rig.ssh_config.read_text().replace(str(rig.identity), str(tmp_path / "other")))
    transport = make_transport(config=config)
    fault = fault_of(transport, rig.hosts[0].spec())
    assert "cannot log in" in str(fault)
    assert "ssh-copy-id" in str(fault.hint)


def test_a_locked_key_is_told_and_nothing_asked(make_transport: MakeTransport, rig: Rig, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    make_key(locked, passphrase="secret")
    config = rig.folder / f"config-{tmp_path.name}"
    config.write_text(rig.ssh_config.read_text().replace(str(rig.identity), str(locked)))
    fault = fault_of(make_transport(config=config), rig.hosts[0].spec())
    assert "cannot log in" in str(fault)
    assert "ssh-add" in str(fault.hint)


def test_a_server_of_passwords_only_is_told_and_nothing_asked(transport: Transport, n2: NetHost) -> None:
    n2.sshd.stop()
    n2.sshd.start({"PasswordAuthentication": "yes", "PubkeyAuthentication": "no"})
    fault = fault_of(transport, n2.spec())
    assert "takes password only" in str(fault)
    assert "PubkeyAuthentication" in str(fault.hint)


def test_an_unknown_host_key_is_refused(make_transport: MakeTransport, rig: Rig, tmp_path: Path) -> None:
    config = config_without_known_hosts(rig, tmp_path)
    before = rig.hosts[0].sshd.log
    fault = fault_of(make_transport(config=config), rig.hosts[0].spec())
    assert "host key" in str(fault)
    assert "not known here" in str(fault)
    assert "--accept-new-host-keys" in str(fault.hint)
    assert "Accepted" not in rig.hosts[0].sshd.log.removeprefix(before)


def test_a_new_host_key_is_accepted_on_demand_and_announced(
    make_transport: MakeTransport, rig: Rig, tmp_path: Path
) -> None:
    config = config_without_known_hosts(rig, tmp_path)
    said: list[str] = []
    accepting = make_transport(config=config, announce=said.append)
    for _ in range(2):
        assert start_python(accepting, rig.hosts[0], "").wait(_PATIENCE_S) == 0
    assert len(said) == 1
    assert said[0].startswith("host n1: ")
    # Known from now on, also to those who accept nothing new.
    strict = make_transport(config=config)
    assert start_python(strict, rig.hosts[0], "").wait(_PATIENCE_S) == 0


@pytest.mark.parametrize("accepts_new", [False, True])
def test_a_changed_host_key_is_refused(
    make_transport: MakeTransport, rig: Rig, tmp_path: Path, accepts_new: bool
) -> None:
    wrong = make_key(tmp_path / "wrong")
    known = rig.folder / f"known-{tmp_path.name}"
    known.write_text(f"{rig.hosts[0].address} {wrong}\n")
    config = rig.folder / f"config-{tmp_path.name}"
    config.write_text(rig.ssh_config.read_text().replace(str(rig.known_hosts), str(known)))
    before = rig.hosts[0].sshd.log
    said: list[str] = []
    transport = make_transport(config=config, announce=said.append if accepts_new else None)
    fault = fault_of(transport, rig.hosts[0].spec())
    assert "not the one known here" in str(fault)
    assert "ssh-keygen -R" in str(fault.hint)
    assert said == []
    assert known.read_text() == f"{rig.hosts[0].address} {wrong}\n"
    assert "Accepted" not in rig.hosts[0].sshd.log.removeprefix(before)


def config_without_known_hosts(rig: Rig, tmp_path: Path) -> Path:
    config = rig.folder / f"config-{tmp_path.name}"
    config.write_text(rig.ssh_config.read_text().replace(str(rig.known_hosts), str(tmp_path / "known_hosts")))
    return config


# --- ssh_config


def test_host_sections_go_by_the_host_s_name(make_transport: MakeTransport, rig: Rig, tmp_path: Path) -> None:
    config = rig.folder / f"config-{tmp_path.name}"
    config.write_text(f"Host gpu-box\n    HostName {rig.hosts[0].address}\n{rig.ssh_config.read_text()}")
    transport = make_transport(config=config)
    channel = transport.start(HostSpec(name="gpu-box", slots=1, source="test"), ["hostname"])
    assert read_all(channel.read_stdout) == b"n1\n"


def test_a_host_behind_a_jump_is_reached(make_transport: MakeTransport, rig: Rig, tmp_path: Path) -> None:
    jump, target = rig.hosts
    config = rig.folder / f"config-{tmp_path.name}"
    config.write_text(f"Host {target.address}\n    ProxyJump {jump.address}\n{rig.ssh_config.read_text()}")
    rig.partition(rig.front, target)
    try:
        transport = make_transport(config=config)
        spec = HostSpec(name=target.address, slots=1, source="test")
        channel = transport.start(spec, ["hostname"])
        assert read_all(channel.read_stdout) == b"n2\n"
        assert channel.wait(_PATIENCE_S) == 0
    finally:
        rig.heal(rig.front, target)


def test_the_host_key_of_a_jump_is_checked_too(make_transport: MakeTransport, rig: Rig, tmp_path: Path) -> None:
    jump, target = rig.hosts
    known = rig.folder / f"known-{tmp_path.name}"
    known.write_text(f"{target.address} {target.sshd.public_key}\n{jump.address} {make_key(tmp_path / 'wrong')}\n")
    config = rig.folder / f"config-{tmp_path.name}"
    text = rig.ssh_config.read_text().replace(str(rig.known_hosts), str(known))
    config.write_text(f"Host {target.address}\n    ProxyJump {jump.address}\n{text}")
    before = jump.sshd.log
    spec = HostSpec(name=target.address, slots=1, source="test")
    assert "host key" in str(fault_of(make_transport(config=config), spec))
    assert "Accepted" not in jump.sshd.log.removeprefix(before)
