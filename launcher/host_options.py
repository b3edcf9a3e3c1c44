"""Options about hosts. For each verb that asks several: which, and the way to them; for `run`, what is done first too.

Only words become values here; what they mean stands in placement and many_hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from .option_words import parse_count, parse_duration, parse_path, parse_port
from .placement import HostRequest
from .transport.choice import TRANSPORTS, TransportName
from .transport.openssh import CONNECT_TIMEOUT_S

_T = TypeVar("_T")

#: Names of the parameters by section of the help.
WHICH = ("hostfile", "include", "exclude", "nodes")
OTHERS = (
    *("transport", "ssh_config", "ssh_port", "accept_new_host_keys", "connect_timeout", "iface", "sync", "workdir"),
    "no_preflight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachOptions:
    """What was typed about which hosts there are and the way to them; attributes are the options."""

    hostfile: str | None
    include: str | None
    exclude: str | None
    nodes: int | None
    transport: TransportName | None
    ssh_config: str | None
    ssh_port: int | None
    accept_new_host_keys: bool
    connect_timeout: float | None

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
    def are_given(self) -> bool:
        """Whether anything was typed."""
        return any(getattr(self, name) for name in self.__dataclass_fields__)

    @property
    def ssh_config_path(self) -> Path | None:
        """The file to read in place of the user's."""
        return None if self.ssh_config is None else Path(self.ssh_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions(ReachOptions):
    """What was typed about the hosts of a job; attributes are the options."""

    iface: str | None
    sync: bool
    workdir: str | None
    no_preflight: bool

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


_REACH = (
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
        "--connect-timeout",
        type=parse_duration,
        metavar="TIME",
        help=f"For a host to answer.  [default: {CONNECT_TIMEOUT_S:g}s]",
    ),
)
_OPTIONS = (
    *_REACH,
    click.option("--iface", metavar="NAME", help="Meet on this network.  [default: the fastest that all share]"),
    click.option("--sync", is_flag=True, help="Copy this folder to every host first, what has changed of it."),
    click.option("--workdir", type=parse_path, metavar="DIR", help="Working folder of all ranks.  [default: this one]"),
    click.option("--no-preflight", is_flag=True, help="Start without comparing the hosts first."),
)


def host_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """Adds the options of a job's hosts to a command, which gets them as one `hosts`, a `HostOptions`."""
    return _with_options(function, HostOptions, _OPTIONS)


def reach_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """Adds the options that name and reach hosts to a command, which gets them as one `hosts`, a `ReachOptions`."""
    return _with_options(function, ReachOptions, _REACH)


def _with_options(
    function: Callable[..., _T],
    kind: type[ReachOptions],
    options: Sequence[Callable[[Callable[..., _T]], Callable[..., _T]]],
) -> Callable[..., _T]:
    @wraps(function)
    def gathered(*args: Any, **values: Any) -> _T:
        own = {name: values.pop(name) for name in kind.__dataclass_fields__}
        return function(*args, hosts=kind(**own), **values)

    command: Callable[..., _T] = gathered
    for option in reversed(options):
        command = option(command)
    return command
