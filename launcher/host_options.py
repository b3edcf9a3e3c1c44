"""The options of `dsrun run` about hosts: which, the way to them, and what is done there before the job.

Only words become values here; what they mean stands in placement and many_hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from .option_words import parse_count, parse_duration, parse_path, parse_port
from .placement import HostRequest
from .transport.choice import TRANSPORTS, TransportName

_T = TypeVar("_T")

#: Names of the parameters by section of the help.
WHICH = ("hostfile", "include", "exclude", "nodes")
OTHERS = (
    *("transport", "ssh_config", "ssh_port", "accept_new_host_keys", "connect_timeout", "iface", "sync", "workdir"),
    "no_preflight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What was typed about hosts; attributes are the options."""

    hostfile: str | None
    include: str | None
    exclude: str | None
    nodes: int | None
    transport: TransportName | None
    ssh_config: str | None
    ssh_port: int | None
    accept_new_host_keys: bool
    connect_timeout: float | None
    iface: str | None
    sync: bool
    workdir: str | None
    no_preflight: bool

    def request(self, ranks_per_host: int | None) -> HostRequest:
        """Returns what says which hosts the job takes."""
        return HostRequest(
            hostfile=self.hostfile,
            include=self.include,
            exclude=self.exclude,
            nodes=self.nodes,
            ranks_per_host=ranks_per_host,
            transport=self.transport,
            ssh_port=self.ssh_port,
        )

    @property
    def ssh_config_path(self) -> Path | None:
        """The file to read in place of the user's."""
        return None if self.ssh_config is None else Path(self.ssh_config)

    def for_remote(self) -> tuple[str, ...]:
        """Returns the options given that mean something for other hosts only, as one would type them."""
        given = {
            f"--transport {self.transport}": self.transport not in (None, "local"),
            f"--ssh-config {self.ssh_config}": self.ssh_config is not None,
            f"--ssh-port {self.ssh_port}": self.ssh_port is not None,
            "--accept-new-host-keys": self.accept_new_host_keys,
            f"--connect-timeout {self.connect_timeout or 0:g}s": self.connect_timeout is not None,
            f"--iface {self.iface}": self.iface is not None,
            "--sync": self.sync,
            "--no-preflight": self.no_preflight,
        }
        return tuple(word for word, is_given in given.items() if is_given)


_OPTIONS = (
    click.option(
        "-H", "--hostfile", type=parse_path, metavar="FILE", help="Hosts, one `host slots=N` a line; - is stdin."
    ),
    click.option("-i", "--include", metavar="FILTER", help="Take only these: `w0@w1:0,2`, `w[0-3]:0-1`."),
    click.option("-e", "--exclude", metavar="FILTER", help="Take all but these."),
    click.option("--nodes", type=parse_count, metavar="N", help="Take the first N hosts."),
    click.option(
        "--transport",
        type=click.Choice(TRANSPORTS),
        metavar="HOW",
        help="Way to the hosts: ssh, openssh (the system's client), srun or local (all of them are this machine).",
    ),
    click.option("--ssh-config", type=parse_path, metavar="FILE", help="Read it in place of ~/.ssh/config."),
    click.option("--ssh-port", type=parse_port, metavar="PORT", hidden=True),
    click.option("--accept-new-host-keys", is_flag=True, help="Trust hosts that known_hosts has not, and note them."),
    click.option(
        "--connect-timeout", type=parse_duration, metavar="TIME", help="For a host to answer.  [default: 10s]"
    ),
    click.option("--iface", metavar="NAME", help="Meet on this network.  [default: the fastest that all share]"),
    click.option("--sync", is_flag=True, help="Copy this folder to every host first, what has changed of it."),
    click.option("--workdir", type=parse_path, metavar="DIR", help="Working folder of all ranks.  [default: this one]"),
    click.option("--no-preflight", is_flag=True, help="Start without comparing the hosts first."),
)


def host_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """Adds the options to a command, which gets them as one `hosts`."""

    @wraps(function)
    def gathered(*args: Any, **values: Any) -> _T:
        own = {name: values.pop(name) for name in HostOptions.__dataclass_fields__}
        return function(*args, hosts=HostOptions(**own), **values)

    command = gathered
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
