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

from dsrun.errors import UsageError

from ..launch.host_placement import NODES_PATIENCE_S, HostRequest, StaticNode
from ..transport.base import CONNECT_TIMEOUT_S, START_PATIENCE_S, STEP_PATIENCE_S
from ..transport.choice import TRANSPORTS, TransportName
from .types import parse_count, parse_duration, parse_file, parse_path, parse_port

_T = TypeVar("_T")

#: Names of the parameters by section of the help.
WHICH = ("hostfile", "include", "exclude", "nodes")
OTHERS = (
    *("transport", "ssh_config", "ssh_port", "accept_new_host_keys", "connect_timeout", "start_timeout"),
    *("iface", "sync", "workdir", "no_preflight", "node_rank", "master_addr", "master_port"),
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
    start_timeout: float | None

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
    node_rank: int | None
    master_addr: str | None
    master_port: int | None

    def for_remote(self) -> tuple[str, ...]:
        """Returns the options given that mean something for other hosts only, as one would type them."""
        is_static = self.node_rank is not None
        given = {
            f"--transport {self.transport}": self.transport not in (None, "local"),
            f"--ssh-config {self.ssh_config}": self.ssh_config is not None,
            f"--ssh-port {self.ssh_port}": self.ssh_port is not None,
            "--accept-new-host-keys": self.accept_new_host_keys,
            f"--connect-timeout {self.connect_timeout or 0:g}s": self.connect_timeout is not None and not is_static,
            f"--iface {self.iface}": self.iface is not None and not is_static,
            "--sync": self.sync,
            "--no-preflight": self.no_preflight,
        }
        return tuple(word for word, is_given in given.items() if is_given)

    def static_node(self) -> StaticNode | None:
        """Returns which of several nodes this one is; None where dsrun starts all of them.

        Raises:
            UsageError: a part of it was left out, or other hosts are named that would be started from here.
        """
        parts = {
            "--node-rank R": self.node_rank,
            "--master-addr ADDR": self.master_addr,
            "--master-port PORT": self.master_port,
        }
        missing = [word for word, value in {"--nodes N": self.nodes, **parts}.items() if value is None]
        if all(value is None for value in parts.values()):
            return None
        whole = "`--nodes N --node-rank R --master-addr ADDR --master-port PORT` on each node starts its ranks alone"
        if missing:
            given = next(word.partition(" ")[0] for word, value in parts.items() if value is not None)
            raise UsageError(
                f"`{given}` without `{missing[0]}`",
                hint=f"{whole}; leave all of them out to start every host from here, where address and port are found",
            )
        clash = [
            word
            for word, value in {
                "--hostfile": self.hostfile,
                "--include": self.include,
                "--exclude": self.exclude,
                "--transport": self.transport,
            }.items()
            if value is not None
        ]
        if clash:
            raise UsageError(f"`{clash[0]}` and `--node-rank` cannot be used together", hint=whole)
        assert self.nodes is not None, "looked at above"
        assert self.node_rank is not None, "looked at above"
        assert self.master_addr is not None, "looked at above"
        assert self.master_port is not None, "looked at above"
        if self.nodes < 1:
            raise UsageError("`--nodes 0`: expected 1 or more", hint=whole)
        if self.node_rank >= self.nodes:
            raise UsageError(
                f"`--node-rank {self.node_rank}` of `--nodes {self.nodes}`: expected 0 to {self.nodes - 1}",
                hint="the first node is 0",
            )
        return StaticNode(
            node_rank=self.node_rank,
            node_count=self.nodes,
            master_addr=self.master_addr,
            master_port=self.master_port,
            interface=self.iface,
            patience_s=self.connect_timeout or NODES_PATIENCE_S,
        )


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
    click.option("--ssh-config", type=parse_file, metavar="FILE", help="Read it in place of ~/.ssh/config."),
    click.option("--ssh-port", type=parse_port, metavar="PORT", hidden=True),
    click.option("--accept-new-host-keys", is_flag=True, help="Trust hosts that known_hosts has not, and note them."),
    click.option(
        "--connect-timeout",
        type=parse_duration,
        metavar="TIME",
        help=f"For a host to answer.  [default: {CONNECT_TIMEOUT_S:g}s]",
    ),
    click.option(
        "--start-timeout",
        type=parse_duration,
        metavar="TIME",
        help=f"Then for dsrun to start.  [default: {START_PATIENCE_S:g}s; srun {STEP_PATIENCE_S:g}s]",
    ),
)
_OPTIONS = (
    *_REACH,
    click.option("--iface", metavar="NAME", help="Meet on this network.  [default: the fastest that all share]"),
    click.option("--sync", is_flag=True, help="Copy this folder to every host first, what has changed of it."),
    click.option("--workdir", type=parse_path, metavar="DIR", help="Working folder of all ranks.  [default: this one]"),
    click.option("--no-preflight", is_flag=True, help="Start without comparing the hosts first."),
    click.option("--node-rank", type=parse_count, metavar="R", help="Start the ranks of node R of `--nodes N` only."),
    click.option("--master-addr", metavar="ADDR", help="With it: where node 0 is."),
    click.option("--master-port", type=parse_port, metavar="PORT", help="With it: a free port of node 0."),
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
