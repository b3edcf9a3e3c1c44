"""Hosts with several networks, as values: they answer the survey's questions about where they meet, with no sockets.

Packets leave as Linux routes them: by the first interface in whose network the other end's address is, whatever address
they were meant to leave from. So two interfaces in one network show here what they show on real hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address, ip_interface
from typing import Any

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.machine.network.interfaces import RdmaDevice
from dsrun.launcher.machine.network.nccl_sockets import NcclLibraries, why_no_sockets
from dsrun.launcher.rendezvous.host_addresses import Address
from dsrun.launcher.rendezvous.reachability import Reached
from dsrun.launcher.survey.client import HostAnswer


@dataclass
class MadeUpHost:
    """A host.

    Attributes:
        addresses: those others may reach.
        cards: RDMA cards of the host.
        environ: environment variables of a login on the host.
        drops: networks of which no packet arrives.
    """

    addresses: Sequence[Address]
    cards: Sequence[RdmaDevice] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    drops: Sequence[str] = ()


class MadeUpNetwork:
    """Answers as `Survey.ask` does for these hosts.

    Args:
        hosts: hosts by name, in rank order.
    """

    def __init__(self, hosts: Mapping[str, MadeUpHost]) -> None:
        self.hosts = hosts
        self.specs = [HostSpec(name=name, slots=8, source="test") for name in hosts]
        self.asked: list[str] = []

    def ask(
        self,
        question: str,
        arguments: Mapping[str, Any] | Callable[[HostSpec], Mapping[str, Any]],
        *,
        host_names: Sequence[str],
        patience_s: float = 0.0,
    ) -> dict[str, HostAnswer]:
        """See `Survey.ask`."""
        self.asked.append(question)
        answers: dict[str, HostAnswer] = {}
        for spec in self.specs:
            if spec.name in host_names:
                given = arguments(spec) if callable(arguments) else arguments
                answers[spec.name] = HostAnswer(getattr(self, question)(self.hosts[spec.name], given), 0.0, 0.0)
        return answers

    def listen(self, host: MadeUpHost, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See `reachability.listen`."""
        named = arguments["interfaces"]
        chosen = [one for one in host.addresses if one.interface in named] if named else host.addresses
        return {"offers": [{**asdict(one), "port": 1} for one in chosen], "left_out": []}

    def listen_rails(self, host: MadeUpHost, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See `reachability.listen_rails`."""
        environ = {**host.environ, **arguments["env"]}
        reason = why_no_sockets(
            environ, host.cards, libraries=NcclLibraries(net_plugin=None, verbs="/usr/lib64/libibverbs.so.1")
        )
        return {"ports": [] if reason else [1 for _ in arguments["addresses"]], "no_sockets": reason}

    def reach(self, host: MadeUpHost, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `reachability.reach`."""
        return [self._reach(host, target["address"]) for target in arguments["targets"]]

    def _reach(self, host: MadeUpHost, address: str) -> dict[str, Any]:
        other = next(one for one in self.hosts.values() if any(entry.address == address for entry in one.addresses))
        for entry in host.addresses:
            network = ip_interface(f"{entry.address}/{entry.prefix}").network
            if ip_address(address) in network:
                if str(network) in other.drops:
                    return {"fault": "no answer"}
                link = {name: getattr(entry, name) for name in ("interface", "speed_mbit", "kind", "driver", "cards")}
                return asdict(Reached(source=entry.address, **link))
        return {"fault": "network is unreachable"}
