"""Which way leads to a host: the transports by name, and one that takes each host's own. Knows no hostfile and no job.

A new way is a module beside this one and a row in `_MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..hosts.spec import HostSpec
from .base import CONNECT_TIMEOUT_S, START_PATIENCE_S, STEP_PATIENCE_S, Channel, OwnedTransport, first_word_patience_s
from .local import LocalTransport

#: `ssh`: a connection of this process; `openssh`: the system's client; `srun`: steps of the Slurm job around this
#: process; `local`: every host is taken to be this machine.
TransportName = Literal["ssh", "openssh", "srun", "local"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachSettings:
    """How hosts are reached, whichever way is taken; a way takes no notice of what it has not.

    Attributes:
        lease_s: longest silence of a host.
        connect_timeout_s: longest wait for a server; None leaves it to the way.
        start_timeout_s: longest wait in seconds for a command to start once the server is there; None leaves it to the
            transport.
        ssh_config: ssh_config to read in place of the user's and the system's; None reads those.
        announce: callback that gets one line about each host key that was accepted as new; None refuses new keys.
        note: callback that gets one line about what a start waits for, if the wait lasts; None for none.
        stdin_fd: descriptor that is handed to commands started on this machine, see `LocalTransport`; None for none.
    """

    lease_s: float
    connect_timeout_s: float | None = None
    start_timeout_s: float | None = None
    ssh_config: Path | None = None
    announce: Callable[[str], None] | None = None
    note: Callable[[str], None] | None = None
    stdin_fd: int | None = None

    @property
    def first_word_s(self) -> float:
        """See `first_word_patience_s`."""
        return first_word_patience_s(self.connect_timeout_s, self.start_timeout_s)


def make_transport(
    name: TransportName, settings: ReachSettings, *, local_hosts: Collection[str] = ()
) -> OwnedTransport:
    """Returns the way to the hosts of a job; the caller closes it in the end.

    Args:
        name: name of the transport to hosts that are not this machine.
        settings: settings of that transport.
        local_hosts: names of the hosts that are this machine; no connection is made to them.
    """
    chosen = _MAKERS[name](settings)
    if not local_hosts or name == "local":
        return chosen
    return _ByHost(LocalTransport(stdin_fd=settings.stdin_fd), chosen, frozenset(local_hosts))


def describe_reach(host: HostSpec, name: TransportName, *, is_local: bool) -> str:
    """Says how a host is reached, for people: `ssh ada@10.0.0.5 port 2222`."""
    if is_local or name == "local":
        return "here"
    if name == "srun":
        return "srun"
    user = "" if host.user is None else f"{host.user}@"
    port = "" if host.port is None else f" port {host.port}"
    return f"{name} {user}{host.address}{port}"


class _ByHost:
    """Starts what is for this machine here, and all else the other way."""

    def __init__(self, here: OwnedTransport, elsewhere: OwnedTransport, local_hosts: frozenset[str]) -> None:
        self._here = here
        self._elsewhere = elsewhere
        self._local_hosts = local_hosts

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        """See `Transport`."""
        return (self._here if host.name in self._local_hosts else self._elsewhere).start(host, argv)

    def close(self) -> None:
        """See `OwnedTransport`."""
        self._here.close()
        self._elsewhere.close()


def _ssh(settings: ReachSettings) -> OwnedTransport:
    from .ssh.connection import SshTransport

    return SshTransport(
        lease_s=settings.lease_s,
        connect_timeout_s=settings.connect_timeout_s or CONNECT_TIMEOUT_S,
        start_patience_s=settings.start_timeout_s or START_PATIENCE_S,
        config=settings.ssh_config,
        announce=settings.announce,
        note=settings.note,
    )


def _openssh(settings: ReachSettings) -> OwnedTransport:
    from .ssh.openssh import OpensshTransport

    return OpensshTransport(
        lease_s=settings.lease_s,
        connect_timeout_s=settings.connect_timeout_s or CONNECT_TIMEOUT_S,
        start_patience_s=settings.start_timeout_s or START_PATIENCE_S,
        config=settings.ssh_config,
        announce=settings.announce,
        note=settings.note,
    )


def _srun(settings: ReachSettings) -> OwnedTransport:
    from .srun import SrunTransport

    return SrunTransport(start_patience_s=settings.start_timeout_s or STEP_PATIENCE_S)


def _local(settings: ReachSettings) -> OwnedTransport:
    return LocalTransport(stdin_fd=settings.stdin_fd)


_MAKERS: Mapping[TransportName, Callable[[ReachSettings], OwnedTransport]] = {
    "ssh": _ssh,
    "openssh": _openssh,
    "srun": _srun,
    "local": _local,
}
