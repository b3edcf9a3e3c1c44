"""Bad networks between the hosts of a rig: packets that get lost, a narrow line, a long way. The kernel does the first
two on the hosts' own interfaces; the third, for which it has no means here, is a relay between front end and hosts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.namespaces import NetHost, Rig
from support.relay import relay

#: In several lines, for nft reads no rule with `numgen` in one.
_LOSS = """
table inet bad_network {{
    chain input {{
        type filter hook input priority 0; policy accept;
        iifname "{device}" numgen random mod 100 < {percent} drop
    }}
}}
"""
_SSH_PORT = 22
#: Networks by name; see `network`.
NETWORKS = ("good", "5 % loss", "30 % loss", "1 Mbit/s", "200 ms")


@contextmanager
def network(name: str, rig: Rig, folder: Path) -> Generator[tuple[Path | None, Path | None]]:
    """One of `NETWORKS`, between the hosts of a rig.

    Args:
        name: name of the network, one of `NETWORKS`.
        rig: the hosts; the second is far away where one is.
        folder: folder for files that say how to reach the hosts.

    Yields:
        hostfile and ssh_config to use; None for the rig's own.
    """
    with ExitStack() as stack:
        files: tuple[Path | None, Path | None] = (None, None)
        match name:
            case "good":
                pass
            case "5 % loss" | "30 % loss":
                stack.enter_context(loss(rig.hosts, int(name.split()[0])))
            case "1 Mbit/s":
                stack.enter_context(narrow(rig.hosts, "1mbit"))
            case "200 ms":
                files = stack.enter_context(far_away(rig, rig.hosts[1], delay_s=0.2, folder=folder))
            case _:
                raise ValueError(f"{name!r} is none of {NETWORKS}")
        yield files


@contextmanager
def loss(hosts: Sequence[NetHost], percent: int) -> Generator[None]:
    """Of a hundred packets that come to each of these hosts, so many get lost."""
    if shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("nft is not installed: apt-get install nftables")
    with ExitStack() as stack:
        for host in hosts:
            host.run("sh", "-c", f"nft -f - <<'END'\n{_LOSS.format(device=host.device, percent=percent)}END\n")
            stack.callback(host.run, "nft", "delete", "table", "inet", "bad_network")
        yield


@contextmanager
def narrow(hosts: Sequence[NetHost], rate: str) -> Generator[None]:
    """Each of these hosts sends no faster than `rate`, as `tc` writes it: `1mbit`."""
    with ExitStack() as stack:
        for host in hosts:
            shape = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s")
            host.run("tc", "qdisc", "add", "dev", host.device, *shape)
            stack.callback(host.run, "tc", "qdisc", "del", "dev", host.device, "root")
        yield


@contextmanager
def far_away(rig: Rig, host: NetHost, *, delay_s: float, folder: Path) -> Generator[tuple[Path, Path]]:
    """All ssh to a host takes a long way; that of the ranks among each other stays as it is.

    Args:
        rig: the host's.
        host: host that is made far away.
        delay_s: seconds that every byte is on its way, in each direction.
        folder: folder for the hostfile, the ssh_config and its known_hosts file.

    Yields:
        a hostfile of the whole rig, and the ssh_config to go with it.
    """
    with relay((host.address, _SSH_PORT), delay_s=delay_s) as line:
        listed, config, known = (folder / name for name in ("far-hosts", "far-ssh_config", "far-known_hosts"))
        ways = {h.name: f"addr={h.address}" for h in rig.hosts} | {host.name: f"addr={line.address} port={line.port}"}
        listed.write_text("".join(f"{name} slots=1 {way}\n" for name, way in ways.items()))
        known.write_text(f"{rig.known_hosts.read_text()}[{line.address}]:{line.port} {host.sshd.public_key}\n")
        config.write_text(rig.ssh_config.read_text().replace(str(rig.known_hosts), str(known)))
        yield listed, config
        assert min(line.carried) > 0, "nobody went over the relay"
