"""Several networks of equal cards between the same hosts, over which NCCL's sockets may spread: chosen and proved.

[Note: rails] A *rail* is a network on which every host has a card of its own. NCCL gives each interface of
NCCL_SOCKET_IFNAME some of its channels, but does not bind the sending end to one: packets leave by whatever interface
the host's routes say. So two interfaces in one subnet are no two rails: all packets leave by the first, and the others'
addresses answer with the wrong hardware address (ARP flux), or not at all (rp_filter). A rail counts here only where
every host was seen to reach every other through the interface of that rail. One slow rail would slow all others down,
for channels wait for each other: only cards that are as fast, or of one cloud's kind, are put together.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from ..hosts.spec import HostSpec
from ..survey.client import HostAnswer, Survey
from .host_addresses import Address, LinkFacts
from .reachability import ANSWER_PATIENCE_S, REACH_PATIENCE_S, Reached, following

#: What a host reports of each address: how it was reached, or why not.
Report = Mapping[str, Reached | str]

#: Clouds' own drivers, which tell no speed: cards of one machine are alike.
_ALIKE = ("ena", "gve")

#: Connections that a host opens at once: half of the 1024 files that a login may have open, the rest is for those who
#: try it. With many rails each host tries fewer of the others.
_MOST_TRIES = 512


@dataclass(frozen=True, slots=True)
class Rail:
    """A network between all hosts.

    Attributes:
        interfaces: host name -> the host's interface on this network.
        addresses: host name -> the host's address on this network.
    """

    interfaces: Mapping[str, str]
    addresses: Mapping[str, str]


def ends_of(offer: Address, reports: Mapping[str, Report]) -> dict[str, Reached]:
    """Returns the other ends of the connections to an address, by host, of those that reached it."""
    return {name: end for name, report in reports.items() if isinstance(end := report[offer.address], Reached)}


def possible_rails(first: str, best: Address, fit: Sequence[Address], reports: Mapping[str, Report]) -> list[Rail]:
    """Returns what may be rails by what is known of cards, the best address's first. See [Note: rails].

    Args:
        first: the host whose addresses they are.
        best: the address where ranks meet.
        fit: all that every host reached, by a `Reached` in each report.
        reports: host name -> what that host reports of each address; without the first host.

    Returns:
        at least two, or none.
    """
    rails: list[Rail] = []
    used: dict[str, set[str]] = {}
    speed = _common_speed(best, ends_of(best, reports))
    for offer in (best, *(offer for offer in fit if offer != best)):
        ends = ends_of(offer, reports)
        links: dict[str, LinkFacts] = {first: offer, **ends}
        is_other = all(
            link.cards and used.setdefault(name, set()).isdisjoint(link.cards) for name, link in links.items()
        )
        parsed = ip_address(offer.address)
        if not is_other or speed is None or _common_speed(offer, ends) != speed:
            continue
        if parsed.is_link_local or parsed.version != ip_address(best.address).version:
            continue
        for name, link in links.items():
            used[name].update(link.cards)
        rails.append(
            Rail(
                {name: link.interface for name, link in links.items() if link.interface is not None},
                {first: offer.address, **{name: end.source for name, end in ends.items()}},
            )
        )
    return rails if len(rails) > 1 else []


def proven_rails(
    survey: Survey, hosts: Sequence[HostSpec], rails: Sequence[Rail], env: Mapping[str, str]
) -> list[Rail]:
    """Lets every host try all others on every rail, unless NCCL takes no sockets on one of them. See [Note: rails].

    Args:
        survey: open to all of them.
        hosts: hosts of the job, in rank order.
        rails: networks that may be rails, to be tried.
        env: variables for the ranks of all hosts.

    Returns:
        those on which every host reached every other through its interface on that rail; at least two, or none.
    """
    names = [host.name for host in hosts]
    words = {name: secrets.token_hex(8) for name in names}
    heard = survey.ask(
        "listen_rails",
        lambda host: {
            "word": words[host.name],
            "addresses": [rail.addresses[host.name] for rail in rails],
            "env": {**env, **host.env},
        },
        host_names=names,
    )
    if not all(isinstance(answer, HostAnswer) and answer.value["no_sockets"] is None for answer in heard.values()):
        # A host that cannot answer is told of by whoever asks it next.
        return []
    ports: dict[str, list[int]] = {
        name: answer.value["ports"] for name, answer in heard.items() if isinstance(answer, HostAnswer)
    }
    count = min(len(following(names, names[0])), max(1, _MOST_TRIES // len(rails)))
    tried = {name: following(names, name)[:count] for name in names}
    answers = survey.ask(
        "reach",
        lambda host: {
            "targets": [
                {"address": rail.addresses[other], "port": ports[other][number], "word": words[other]}
                for number, rail in enumerate(rails)
                for other in tried[host.name]
            ],
            "patience_s": REACH_PATIENCE_S,
        },
        host_names=names,
        patience_s=REACH_PATIENCE_S + ANSWER_PATIENCE_S,
    )
    proven: list[Rail] = []
    for number, rail in enumerate(rails):
        if all(
            isinstance(answer, HostAnswer)
            and all(
                way.get("interface") == rail.interfaces[name]
                for way in answer.value[number * count : (number + 1) * count]
            )
            for name, answer in answers.items()
        ):
            proven.append(rail)
    return proven if len(proven) > 1 else []


def _common_speed(offer: Address, ends: Mapping[str, Reached]) -> int | str | None:
    """Returns the slowest end's speed; a cloud's driver where no end tells one; None where they cannot be compared."""
    links: list[LinkFacts] = [offer, *ends.values()]
    speeds = [link.speed_mbit for link in links if link.speed_mbit is not None]
    if len(speeds) == len(links):
        return min(speeds)
    drivers = {link.driver for link in links}
    return next((driver for driver in _ALIKE if drivers == {driver} and not speeds), None)
