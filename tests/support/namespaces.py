"""Hosts for tests, made of namespaces on this machine: network, mounts, processes and name of their own, and an sshd.

Each host has its own /dev/shm, /tmp, /run and /etc/hosts; the rest of the file system, and so the virtual environment,
is seen by all. Every namespace hangs on one process whose stdin is a pipe from the test: when it is closed, or the
test is killed, the kernel takes down the host's processes, its interfaces and the bridge between the hosts.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dsrun.launcher.hosts.spec import HostSpec
from support.sshd import Sshd, find_sshd, make_key

_REPOSITORY = Path(__file__).resolve().parents[2]
#: A host's folders become its own; then it waits for the end of the test. Words: name, folder, what /tmp must show.
_HOST_SCRIPT = """
hostname "$1"; folder=$2; shift 2
mount -t tmpfs tmpfs /dev/shm
# /sys shows the network namespace it was mounted in; control groups stay where they were.
mkdir "$folder/sys" "$folder/tmp"
mount -t sysfs sysfs "$folder/sys"
if [ -d "$folder/sys/fs/cgroup" ]; then mount --rbind /sys/fs/cgroup "$folder/sys/fs/cgroup"; fi
mount --rbind "$folder/sys" /sys
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs "$folder/tmp"
for seen in "$@"; do
    mkdir -p "$folder/tmp/${seen#/tmp/}"
    mount --bind "$seen" "$folder/tmp/${seen#/tmp/}"
done
mount --rbind "$folder/tmp" /tmp
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
# Logins to all hosts at once would run what this machine's user runs at login, which may wait for one another at home.
: >"$folder/login"
for start_up in "$HOME/.bashrc" "$HOME/.bash_profile" "$HOME/.profile"; do
    if [ -e "$start_up" ]; then mount --bind "$folder/login" "$start_up"; fi
done
# Whatever is orphaned on this host becomes a child of this process, which waits for none; the shell would.
trap '' CHLD
echo ready
exec cat >/dev/null
"""
_SWITCH_SCRIPT = "echo ready; exec cat >/dev/null"
_END_PATIENCE_S = 20.0


def why_no_hosts() -> str | None:
    """Why hosts cannot be made here, for a test to be skipped with; None if they can."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    missing = [name for name in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen") if shutil.which(name) is None]
    missing += ["sshd"] if find_sshd() is None else []
    if missing:
        return f"hosts of namespaces need {', '.join(missing)}: apt-get install openssh-server iproute2 util-linux"
    made = subprocess.run(["unshare", "-m", "-u", "-n", "-p", "-f", "true"], capture_output=True, text=True)
    return f"no namespaces may be made here: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True, slots=True)
class Node:
    """One end of the test's network: a host, or this machine as the front end.

    Attributes:
        name: name of the node in /etc/hosts of every host.
        address: IPv4 on the test's network.
        address6: IPv6 on it, None where the kernel has none.
        device: its interface there.
        enter: words before a command that take it there.
    """

    name: str
    address: str
    address6: str | None
    device: str
    enter: tuple[str, ...]

    def run(self, *words: str) -> str:
        """Runs a command there, without ssh; returns what it printed."""
        return _run([*self.enter, *words])


@dataclass(frozen=True, slots=True)
class NetHost(Node):
    """A host with an sshd on port 22."""

    sshd: Sshd

    def spec(self, *, slots: int = 1, addr: str | None = None) -> HostSpec:
        """The host as a hostfile would describe it."""
        return HostSpec(name=self.name, slots=slots, source="test", addr=addr or self.address)


@dataclass(frozen=True, slots=True)
class Rig:
    """Some hosts, this machine as the front end, and what is needed to log in.

    Attributes:
        hosts: n1, n2, ...
        front: this machine, as the front end.
        folder: folder for files that this machine and all hosts see under the same path.
        ssh_config: path of the ssh_config, which names the key and the known hosts below; no file of the user is read.
        identity: the private key that every host lets in.
        known_hosts: the hosts' keys, as they were when the rig was made.
    """

    hosts: tuple[NetHost, ...]
    front: Node
    folder: Path
    ssh_config: Path
    identity: Path
    known_hosts: Path

    def partition(self, one: Node, other: Node) -> None:
        """Lets whatever the two send each other vanish without a word, until `heal`."""
        for here, there in ((one, other), (other, one)):
            # To a neighbour that nobody is: needs no packet filter, and no reset is ever sent.
            for address in _addresses(there):
                here.run(
                    *("ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:00"),
                    *("dev", here.device, "nud", "permanent"),
                )

    def heal(self, one: Node, other: Node) -> None:
        """Ends a partition."""
        for here, there in ((one, other), (other, one)):
            for address in _addresses(there):
                here.run("ip", "neigh", "del", address, "dev", here.device)


@contextmanager
def hosts(count: int, folder: Path) -> Generator[Rig]:
    """Makes `count` hosts that reach each other and this machine; takes all of it away in the end.

    Args:
        count: number of hosts.
        folder: an empty folder of the test's own, seen by all hosts.
    """
    with ExitStack() as stack:
        number = stack.enter_context(_network_number())
        switch = stack.enter_context(_holder(["unshare", "-n"], _SWITCH_SCRIPT, []))
        front = Node("front", _address(number, 1), _address6(number, 1), f"dsr{number}", ())
        _run(["ip", "link", "add", front.device, "type", "veth", "peer", "name", "up0", "netns", str(switch)])
        # Gone with the switch, but the kernel takes its time, and the next rig may have the same number.
        stack.callback(_run_anyway, ["ip", "link", "del", front.device])
        _run(["ip", "-batch", "-"], stdin=_set_up(front))

        rig = Rig((), front, folder, folder / "ssh_config", folder / "id", folder / "known_hosts")
        (folder / "authorized_keys").write_text(make_key(rig.identity) + "\n")
        names = {f"n{index}": index + 9 for index in range(1, count + 1)}
        table = "".join(f"{_address(number, last)} {name}\n" for name, last in names.items())
        made = tuple(
            stack.enter_context(_host(rig, name, _address(number, last), _address6(number, last), switch, table))
            for name, last in names.items()
        )
        ports = ["up0", *names]
        join = "".join(f"link set {port} master br0 up\n" for port in ports)
        bridge = "link add br0 type bridge mcast_snooping 0\nlink set br0 up\n"
        _run(["nsenter", "-t", str(switch), "-n", "ip", "-batch", "-"], stdin=bridge + join)
        for host in made:
            host.sshd.start()
            stack.callback(host.sshd.stop)
        rig.known_hosts.write_text(
            "".join(f"{address} {host.sshd.public_key}\n" for host in made for address in _addresses(host))
        )
        rig.ssh_config.write_text(
            "Host *\n"
            "    User root\n"
            f"    IdentityFile {rig.identity}\n"
            "    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {rig.known_hosts}\n"
            "    GlobalKnownHostsFile /dev/null\n"
        )
        yield Rig(made, front, folder, rig.ssh_config, rig.identity, rig.known_hosts)


@contextmanager
def _host(rig: Rig, name: str, address: str, address6: str | None, switch: int, table: str) -> Generator[NetHost]:
    own = rig.folder / name
    own.mkdir()
    (own / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{table}")
    seen = [str(path) for path in (rig.folder, _REPOSITORY, Path(sys.prefix), Path(sys.base_prefix))]
    below_tmp = sorted({path for path in seen if path.startswith("/tmp/")})
    make = ["unshare", "-m", "-u", "-n", "-p", "-f", "--kill-child", "--mount-proc"]
    with _holder(make, _HOST_SCRIPT, [name, str(own), *below_tmp]) as holder:
        enter = ("nsenter", "-t", str(holder), "-m", "-u", "-n", "-p", "--")
        link = ["ip", "link", "add", "eth0", "netns", str(holder), "type", "veth", "peer", "name", name]
        _run([*link, "netns", str(switch)])
        sshd = Sshd(own, rig.folder / "authorized_keys", prefix=enter)
        host = NetHost(name, address, address6, "eth0", enter, sshd)
        _run([*enter, "ip", "-batch", "-"], stdin=f"link set lo up\n{_set_up(host)}")
        yield host


@contextmanager
def _holder(make: Sequence[str], script: str, words: Sequence[str]) -> Generator[int]:
    """The process that a namespace hangs on; yields its id as seen from here."""
    process = subprocess.Popen(
        [*make, "sh", "-ec", script, "holder", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None, "stdin is a pipe"
    assert process.stdout is not None, "stdout is a pipe"
    try:
        assert process.stdout.readline() == "ready\n", f"{make} cannot make a host: it ended with {process.wait()}"
        children = psutil.Process(process.pid).children()
        yield children[0].pid if children else process.pid
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(_END_PATIENCE_S)


@contextmanager
def _network_number() -> Generator[int]:
    """Takes a network number that no other test on this machine has; a test that is killed gives its back."""
    for number in range(256):
        with socket.socket(socket.AF_UNIX) as claim, suppress(OSError):
            claim.bind(f"\0dsrun-test-network-{number}")
            yield number
            return
    raise AssertionError("256 rigs run on this machine")


def _address(number: int, last: int) -> str:
    # The range for tests of network devices, RFC 2544: nobody's own network.
    return f"198.18.{number}.{last}"


def _address6(number: int, last: int) -> str | None:
    if not Path("/proc/net/if_inet6").exists():
        return None
    # As the kernel and ssh write it, for known_hosts is compared as text.
    return str(ipaddress.IPv6Address(f"fd5d:5d5d:5d5d:{number:x}::{last:x}"))


def _addresses(node: Node) -> list[str]:
    return [node.address] if node.address6 is None else [node.address, node.address6]


def _set_up(node: Node) -> str:
    lines = [f"addr add {node.address}/24 dev {node.device}", f"link set {node.device} up"]
    if node.address6 is not None:
        lines.append(f"addr add {node.address6}/64 dev {node.device} nodad")
    return "\n".join(lines) + "\n"


def _run(words: Sequence[str], *, stdin: str = "") -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def _run_anyway(words: Sequence[str]) -> None:
    subprocess.run(words, capture_output=True)
