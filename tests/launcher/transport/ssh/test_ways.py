"""How people reach and enter their hosts: agents, jumps, proxies, shells and ssh_config, by both ways of ssh."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.base import Transport
from support.channels import MakeTransport, fault_of, read_all, start_python
from support.namespaces import NetHost, Rig, hosts, why_no_hosts
from support.sshd import make_key

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(60)]

_PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(3, tmp_path_factory.mktemp("rig")) as made:
        yield made


@pytest.fixture
def n2(rig: Rig) -> Generator[NetHost]:
    """The second host, whose server a test may stop and start as it likes."""
    host = rig.hosts[1]
    yield host
    host.sshd.stop()
    host.sshd.start()


#: Makes a transport that reads these lines of ssh_config first, and the rig's with something put in place of something.
Configured = Callable[..., Transport]


@pytest.fixture
def configured(make_transport: MakeTransport, rig: Rig, tmp_path: Path) -> Configured:
    def make(text: str = "", *, old: str = "\0", new: str = "") -> Transport:
        config = tmp_path / "ssh_config"
        config.write_text(textwrap.dedent(text) + rig.ssh_config.read_text().replace(old, new))
        return make_transport(config=config)

    return make


@pytest.fixture
def is_fabric(request: pytest.FixtureRequest) -> bool:
    return "fabric" in request.node.name


def named(name: str) -> HostSpec:
    return HostSpec(name=name, slots=1, source="test")


def name_of(transport: Transport, spec: HostSpec) -> str:
    """Which host it is that is reached."""
    return read_all(transport.start(spec, ["hostname"]).read_stdout).decode().strip()


# --- keys


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """An ssh-agent, which the environment names; yields its socket."""
    socket = tmp_path / "agent"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None, "stdout is a pipe"
        assert "SSH_AUTH_SOCK" in process.stdout.readline()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        yield socket
    finally:
        process.kill()
        process.communicate(timeout=_PATIENCE_S)


@pytest.mark.usefixtures("agent")
def test_a_key_that_only_the_agent_has_opens_the_door(configured: Configured, rig: Rig) -> None:
    key = f"    IdentityFile {rig.identity}\n    IdentitiesOnly yes\n"
    spec = rig.hosts[0].spec()
    assert "cannot log in" in str(fault_of(configured(old=key, new="    IdentityFile none\n"), spec))
    subprocess.run(["ssh-add", "-q", str(rig.identity)], check=True, stdin=subprocess.DEVNULL)
    assert name_of(configured(old=key, new="    IdentityFile none\n"), spec) == "n1"
    # Where ssh_config wants no other keys than those it names, the agent's are not offered.
    assert "cannot log in" in str(fault_of(configured(old=key, new="    IdentitiesOnly yes\n"), spec))


#: Starts a command as the front end would, and says how it went; the words are its transport, ssh_config and address.
ON_A_TERMINAL = """
import importlib, sys
from pathlib import Path
from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
module, name, config, address = sys.argv[1:]
transport = getattr(importlib.import_module(module), name)(lease_s=15, config=Path(config))
open("/dev/tty").close()
try:
    transport.start(HostSpec(name="n2", slots=1, source="test", addr=address), ["true"])
except LaunchError as error:
    sys.exit(7 if "cannot log in" in str(error) else str(error))
"""


@pytest.mark.parametrize("way", ["ssh.connection.SshTransport", "ssh.openssh.OpensshTransport"])
@pytest.mark.parametrize("case", ["password", "passphrase", "second factor"])
def test_nothing_is_asked_on_a_terminal_or_by_a_window(
    rig: Rig, n2: NetHost, tmp_path: Path, way: str, case: str
) -> None:
    locked = tmp_path / "locked"
    make_key(locked, passphrase="secret")
    config = tmp_path / "ssh_config"
    identity = locked if case == "passphrase" else rig.identity
    config.write_text(rig.ssh_config.read_text().replace(str(rig.identity), str(identity)))
    options = {
        "password": {"PasswordAuthentication": "yes", "PubkeyAuthentication": "no"},
        "passphrase": {},
        "second factor": {"PasswordAuthentication": "yes", "AuthenticationMethods": "publickey,password"},
    }
    n2.sshd.stop()
    n2.sshd.start(options[case])
    asked = tmp_path / "asked"
    window = tmp_path / "askpass"
    window.write_text(f"#!/bin/sh\ntouch {asked}\n")
    window.chmod(0o755)
    module, _, name = way.rpartition(".")
    words = [f"dsrun.launcher.transport.{module}", name, str(config), n2.address]
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "SSH_ASKPASS": str(window), "DISPLAY": ":0", "SSH_ASKPASS_REQUIRE": "force"}
        os.execve(sys.executable, [sys.executable, "-c", ON_A_TERMINAL, *words], environment)
    said = _read_terminal(terminal)
    _, status = os.waitpid(pid, 0)
    assert (said, os.waitstatus_to_exitcode(status)) == ("", 7)
    assert not asked.exists()


def _read_terminal(terminal: int) -> str:
    said = b""
    deadline_s = time.monotonic() + 2 * _PATIENCE_S
    while select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        try:
            data = os.read(terminal, 4096)
        except OSError:
            # The last that had the terminal has gone.
            break
        said += data
    os.close(terminal)
    return said.decode()


# --- the way there


def test_jumps_are_taken_in_their_order(configured: Configured, rig: Rig) -> None:
    one, other, target = rig.hosts
    cuts = ((rig.front, other), (rig.front, target), (one, target))
    for cut in cuts:
        rig.partition(*cut)
    try:
        way = f"{one.address},{other.address}"
        transport = configured(f"Host far\n    HostName {target.address}\n    ProxyJump {way}\n")
        assert name_of(transport, named("far")) == "n3"
    finally:
        for cut in cuts:
            rig.heal(*cut)


def test_a_jump_may_have_a_jump_and_a_name_of_its_own(configured: Configured, rig: Rig) -> None:
    one, other, target = rig.hosts
    cuts = ((rig.front, other), (rig.front, target))
    for cut in cuts:
        rig.partition(*cut)
    try:
        transport = configured(
            f"""
            Host far
                HostName {target.address}
                ProxyJump root@middle:22
            Host middle
                HostName {other.address}
                ProxyJump {one.address}
            Host {one.address}
                ProxyJump none
            """
        )
        assert name_of(transport, named("far")) == "n3"
    finally:
        for cut in cuts:
            rig.heal(*cut)


def test_a_jump_for_all_hosts_is_none_for_itself(configured: Configured, rig: Rig, is_fabric: bool) -> None:
    jump, target, _ = rig.hosts
    transport = configured(f"Host *\n    ProxyJump {jump.address}\n")
    if is_fabric:
        assert name_of(transport, named(jump.address)) == "n1"
    else:
        assert "loop" in str(fault_of(transport, named(jump.address)))
        return
    assert name_of(transport, named(target.address)) == "n2"


def test_a_proxy_command_carries_the_connection(configured: Configured, rig: Rig, tmp_path: Path) -> None:
    jump, target, _ = rig.hosts
    log = tmp_path / "log"
    # Read by a shell, as the system's client has it.
    proxy = f"sh -c 'echo %h %p %r >> {log}; exec ssh -F {rig.ssh_config} -W %h:%p {jump.address}'"
    rig.partition(rig.front, target)
    try:
        transport = configured(
            f"""
            Host far n2
                User root
                ProxyCommand {proxy}
            Host far
                HostName {target.address}
            """
        )
        assert name_of(transport, named("far")) == "n2"
        # Where the hostfile says that a host is, there the proxy is to lead.
        assert name_of(transport, target.spec()) == "n2"
    finally:
        rig.heal(rig.front, target)
    assert log.read_text() == f"{target.address} 22 root\n" * 2


def test_a_proxy_that_leads_nowhere_is_told_with_what_it_said(
    make_transport: MakeTransport, rig: Rig, tmp_path: Path
) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n    ProxyCommand sh -c 'echo no way to %h >&2'\n{rig.ssh_config.read_text()}")
    transport = make_transport(config=config, connect_timeout_s=2)
    assert f"no way to {rig.hosts[0].address}" in str(fault_of(transport, rig.hosts[0].spec()))


# --- ssh_config


def test_aliases_users_ports_keys_matches_and_includes_are_followed(
    configured: Configured, rig: Rig, n2: NetHost, tmp_path: Path
) -> None:
    n2.sshd.stop()
    n2.sshd.start({"Port": "2222"})
    box = tmp_path / "conf.d" / "box"
    box.parent.mkdir()
    box.write_text(f"Host box\n    HostName {n2.address}\n    Port 2222\n")
    known = tmp_path / "known"
    known.write_text(f"[{n2.address}]:2222 {n2.sshd.public_key}\n")
    transport = configured(
        f"""
        Include {tmp_path}/conf.d/*
        Match host {n2.address}
            User root
            IdentityFile {rig.identity}
        Match originalhost box
            UserKnownHostsFile {known}
        """,
        old=f"    User root\n    IdentityFile {rig.identity}\n",
        new="    User nobody-here\n    IdentityFile none\n",
    )
    assert name_of(transport, named("box")) == "n2"


def test_another_name_for_the_host_key_is_followed_or_refused(
    configured: Configured, rig: Rig, tmp_path: Path, is_fabric: bool
) -> None:
    known = tmp_path / "known"
    known.write_text(f"the-real-name {rig.hosts[0].sshd.public_key}\n")
    before = rig.hosts[0].sshd.log
    transport = configured(f"Host n1\n    HostKeyAlias the-real-name\n    UserKnownHostsFile {known}\n")
    if not is_fabric:
        assert name_of(transport, rig.hosts[0].spec()) == "n1"
        return
    fault = fault_of(transport, rig.hosts[0].spec())
    assert "HostKeyAlias the-real-name" in str(fault)
    assert "--transport openssh" in str(fault.hint)
    assert rig.hosts[0].sshd.log == before
    # Of other hosts it was not asked.
    assert name_of(transport, rig.hosts[1].spec()) == "n2"


# --- login shells


@pytest.fixture
def login_shell(rig: Rig, tmp_path: Path) -> Generator[Callable[[str], NetHost]]:
    """Gives root another login shell on n3, until the end of the test."""
    host = rig.hosts[2]
    users = rig.folder / f"passwd-{tmp_path.name}"
    shutil.copy("/etc/passwd", users)
    host.run("mount", "--bind", str(users), "/etc/passwd")

    def change(shell: str) -> NetHost:
        lines = [line.split(":") for line in users.read_text().splitlines()]
        users.write_text("".join(":".join([*line[:6], shell if line[2] == "0" else line[6]]) + "\n" for line in lines))
        return host

    yield change
    host.run("umount", "/etc/passwd")


#: A shell that, as csh does, takes a line's end within quotes for a fault, and `!` for a word of its history.
LIKE_CSH = r"""#!/bin/sh
newline='
'
case "$2" in
    *"$newline"*) echo "Unmatched quote." >&2; exit 1 ;;
    *!*) echo "Event not found." >&2; exit 1 ;;
esac
exec /bin/sh -c "$2"
"""


@pytest.mark.parametrize("shell", ["csh", "fish", "zsh", "like csh"])
def test_a_command_starts_behind_any_login_shell(
    login_shell: Callable[[str], NetHost], configured: Configured, rig: Rig, shell: str
) -> None:
    like_csh = rig.folder / "like-csh"
    like_csh.write_text(LIKE_CSH)
    like_csh.chmod(0o755)
    path = str(like_csh) if shell == "like csh" else shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    words = ["a!b", "two\nlines", "it's", "\\\\", "$HOME"]
    channel = start_python(configured(), login_shell(path), "import sys; print(sys.argv[1:])", *words)
    assert read_all(channel.read_stdout).decode() == f"{words}\n"
    assert channel.wait(_PATIENCE_S) == 0


def test_an_account_without_a_shell_is_told(login_shell: Callable[[str], NetHost], configured: Configured) -> None:
    path = shutil.which("nologin", path="/usr/sbin:/sbin")
    assert path is not None, "every distribution has one"
    fault = fault_of(configured(), login_shell(path).spec())
    assert "its shell ended with 1" in str(fault)
    assert "not available" in str(fault)
