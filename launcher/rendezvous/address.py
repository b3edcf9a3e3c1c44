"""Where the ranks of a job meet: the address of the first host that all hosts reach, and each host's way to it.

Nothing is guessed from names or routes. The first host listens on each of its addresses, all others try all of them,
and what they report decides; see reachability for both ends. The ports are closed again before the job: the agent
listens anew, and what was proved is that the network lets connections through.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_interface
from typing import Any

from dsrun.errors import PreflightError, Problem

from ..excerpts import listed
from ..hosts.spec import HostSpec
from ..plan.environment import interface_variables
from ..survey.client import HostAnswer, NoAnswer, Survey
from .host_addresses import Address
from .rails import Rail, Report, ends_of, possible_rails, proven_rails
from .reachability import ANSWER_PATIENCE_S, REACH_PATIENCE_S, Reached

#: Once one address is reached, for the others: a single lost packet is repeated within it. Black-holed addresses of
#: hosts with several networks would otherwise cost every launch the whole patience.
_REST_S = 1.2


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where ranks meet.

    Attributes:
        address: address of the first host where the ranks meet; it goes into MASTER_ADDR.
        interfaces: host name -> interface that leads to the address, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME;
            empty for a job of one host. Hosts are left out where no interface has their end of the connection.
        rails: host name -> all interfaces over which NCCL's sockets may spread, that of `interfaces` first; empty where
            it is the only one, or where NCCL takes no sockets. See [Note: rails].
        reason: reason why the ranks meet at this address, in words; empty where there was no choice.
    """

    address: str
    interfaces: dict[str, str]
    rails: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    reason: str = field(default="", compare=False)

    def variables(self) -> dict[str, dict[str, str]]:
        """Returns the variables of each host's ranks, by its name."""
        return {
            name: interface_variables(interface, self.rails.get(name, ()))
            for name, interface in self.interfaces.items()
        }

    def text(self) -> str | None:
        """Returns one line about what was chosen and why; None where there was no choice."""
        if not self.reason:
            return None
        first = next(iter(self.interfaces.values()), None)
        told = f"ranks meet at {self.address}{f' ({first})' if first else ''}: {self.reason}"
        rails = next(iter(self.rails.values()), ())
        return f"{told}; NCCL's sockets use {', '.join(rails)}" if rails else told


@dataclass(frozen=True, slots=True)
class HostLinks:
    """How hosts meet.

    Attributes:
        meeting: address where the hosts meet, and the interfaces that lead there.
        ends: host name -> the host's own address on the way to the meeting address; without the first host.
    """

    meeting: RendezvousAddress
    ends: dict[str, str]


def choose_meeting(
    survey: Survey, hosts: Sequence[HostSpec], *, iface: str | None = None, env: Mapping[str, str] | None = None
) -> RendezvousAddress:
    """Asks the hosts where they can meet.

    Args:
        survey: open to all of them.
        hosts: hosts of the job, in rank order; not empty.
        iface: interfaces of the first host to meet at, `ib0` or `ib0,eth0`, the best first; None takes the fastest.
        env: variables for the ranks of all hosts; those of NCCL say what it talks over.

    Raises:
        PreflightError: a host does not answer, or no address is reached by all; shows who reached what.
    """
    return find_meeting(survey, hosts, iface=iface, env=env).meeting


def find_meeting(
    survey: Survey, hosts: Sequence[HostSpec], *, iface: str | None = None, env: Mapping[str, str] | None = None
) -> HostLinks:
    """Does what `choose_meeting` does, and tells more of it."""
    first, *others = [host.name for host in hosts]
    if not others:
        return HostLinks(RendezvousAddress("127.0.0.1", {}), {})
    word = secrets.token_hex(16)
    names = None if iface is None else [name.strip() for name in iface.split(",") if name.strip()]
    heard = survey.ask("listen", {"word": word, "interfaces": names}, host_names=[first])[first]
    if isinstance(heard, NoAnswer):
        raise PreflightError(f"host {first}: {heard.reason}", hint=heard.hint)
    offers = [_address(offer) for offer in heard.value["offers"]]
    left_out = [_address(entry) for entry in heard.value["left_out"]]
    targets = [{"address": offer["address"], "port": offer["port"], "word": word} for offer in heard.value["offers"]]
    asked = {"targets": targets, "patience_s": REACH_PATIENCE_S, "rest_s": _REST_S}
    answers = survey.ask("reach", asked, host_names=others, patience_s=REACH_PATIENCE_S + ANSWER_PATIENCE_S)
    silent = [
        Problem(f"host {name}: {answer.reason}", answer.hint)
        for name, answer in answers.items()
        if isinstance(answer, NoAnswer)
    ]
    if silent:
        raise PreflightError.of(silent)
    reports = {
        name: {offer.address: _report(entry) for offer, entry in zip(offers, answer.value, strict=True)}
        for name, answer in answers.items()
        if isinstance(answer, HostAnswer)
    }
    meeting, rails = decide(first, offers, reports, left_out=left_out, in_order=names is not None)
    if rails and (proven := proven_rails(survey, hosts, rails, env or {})):
        spread = {host.name: tuple(rail.interfaces[host.name] for rail in proven) for host in hosts}
        meeting = replace(meeting, rails=spread)
    ways = {name: report[meeting.address] for name, report in reports.items()}
    return HostLinks(meeting, {name: way.source for name, way in ways.items() if isinstance(way, Reached)})


def decide(
    first: str,
    offers: Sequence[Address],
    reports: Mapping[str, Report],
    *,
    left_out: Sequence[Address] = (),
    in_order: bool = False,
) -> tuple[RendezvousAddress, list[Rail]]:
    """Chooses the best of the addresses that all hosts reached.

    Tunnels (VPNs, overlays) come last, and so do IPv4 addresses that the host gave itself. Of the others the fastest
    link comes first (the slowest end of it counts; see `LinkFacts.taken_mbit` for an unknown one), then an address that
    no router stands before, then the interface of the default route, then IPv4, then the order of the offers.

    Args:
        first: the host whose addresses they are.
        offers: addresses that the first host listened on.
        reports: host name -> what that host reports of each address; without the first host.
        left_out: addresses nobody tried, and why, for the error.
        in_order: the user named the interfaces: the order of the offers decides alone.

    Returns:
        where they meet, and what may be rails, still to be proved.

    Raises:
        PreflightError: no address is reached by all.
    """
    fit = [offer for offer in offers if all(isinstance(report[offer.address], Reached) for report in reports.values())]
    if not fit:
        raise _nowhere(first, offers, reports, left_out)
    best = fit[0] if in_order else min(fit, key=lambda offer: _rank(offer, reports))
    interfaces = {first: best.interface}
    for name, end in ends_of(best, reports).items():
        if end.interface is not None:
            interfaces[name] = end.interface
    reason = _reason(best, fit, reports, in_order=in_order)
    return RendezvousAddress(best.address, interfaces, reason=reason), possible_rails(first, best, fit, reports)


@dataclass(frozen=True, slots=True, order=True)
class _Rank:
    """Sorts the better first."""

    is_tunnel: bool
    is_link_local: bool
    slowness_mbit: int
    is_far: bool
    is_beside_route: bool
    is_ipv6: bool


def _rank(offer: Address, reports: Mapping[str, Report]) -> _Rank:
    ends = ends_of(offer, reports).values()
    parsed = ip_address(offer.address)
    network = None if offer.prefix is None else ip_interface(f"{offer.address}/{offer.prefix}").network
    return _Rank(
        is_tunnel=any(link.kind == "tunnel" for link in (offer, *ends)),
        is_link_local=parsed.is_link_local,
        slowness_mbit=-min(link.taken_mbit for link in (offer, *ends)),
        is_far=network is None or not all(ip_address(end.source) in network for end in ends),
        is_beside_route=not offer.default_route,
        is_ipv6=parsed.version == 6,
    )


def _reason(best: Address, fit: Sequence[Address], reports: Mapping[str, Report], *, in_order: bool) -> str:
    """Says why an address was taken, against the best on another interface; empty where there is none."""
    others = [offer for offer in fit if offer.interface != best.interface]
    if not others:
        return ""
    names = list(dict.fromkeys(offer.interface for offer in others))
    listed_names = ", ".join(names)
    if in_order:
        return f"named before {listed_names}"
    second = min(others, key=lambda offer: _rank(offer, reports))
    one, other = _rank(best, reports), _rank(second, reports)
    if one.is_tunnel != other.is_tunnel:
        return f"{listed_names} {'is a tunnel' if len(names) == 1 else 'are tunnels'}"
    if one.is_link_local != other.is_link_local:
        return f"{listed_names}: link-local only"
    speed, next_speed = _speed(best, reports), _speed(second, reports)
    if one.slowness_mbit != other.slowness_mbit:
        return f"the fastest that all reach ({speed}; {second.interface} {next_speed})"
    reason = "comes first"
    if one.is_far != other.is_far:
        reason = "has no router before it"
    elif one.is_beside_route != other.is_beside_route:
        reason = "has the default route"
    alike = [offer.interface for offer in others if _rank(offer, reports).slowness_mbit == one.slowness_mbit]
    return f"as fast as {', '.join(dict.fromkeys(alike))} ({speed}), and {reason}"


def _speed(offer: Address, reports: Mapping[str, Report]) -> str:
    """Writes the speed of the slowest end."""
    speeds = [link.speed_mbit for link in (offer, *ends_of(offer, reports).values())]
    known = [speed for speed in speeds if speed is not None]
    return f"{min(known) / 1000:g} Gbit/s" if len(known) == len(speeds) else "speed unknown"


def _nowhere(
    first: str, offers: Sequence[Address], reports: Mapping[str, Report], left_out: Sequence[Address]
) -> PreflightError:
    if not offers:
        shown = "".join(f"\n  {entry.address} ({entry.interface}): {entry.unfit}" for entry in left_out)
        return PreflightError(
            f"host {first} has no address that other hosts could reach{shown}",
            hint="bring an interface up there; where all hosts are one machine, `--iface lo` will do",
        )
    lines = [f"host {first}: none of its addresses is reached by all other hosts"]
    for offer in offers:
        missed = ", ".join(_missed(offer, reports))
        lines.append(f"  {offer.address} ({offer.interface}): not reached by {missed}")
    interfaces = list(dict.fromkeys(offer.interface for offer in offers))
    others = [entry.interface for entry in left_out if entry.unfit != "loopback" and entry.interface not in interfaces]
    untried = list(dict.fromkeys(others))
    if untried:
        lines.append(f"  not tried: {', '.join(untried)}")
    names = f"{first} has {', '.join([*interfaces, *untried])}"
    return PreflightError(
        "\n".join(lines),
        hint=f"let its firewall pass TCP from the others, or name the interface of a network that all are on with "
        f"`--iface` ({names})",
    )


def _missed(offer: Address, reports: Mapping[str, Report]) -> Iterator[str]:
    """Yields who did not reach an address, together where the reason is the same."""
    reasons = {name: reason for name, report in reports.items() if isinstance(reason := report[offer.address], str)}
    for reason, count in Counter(reasons.values()).items():
        names = [name for name, its_reason in reasons.items() if its_reason == reason]
        yield f"{'all' if count == len(reports) > 1 else listed(names)} ({reason})"


def _address(value: Mapping[str, Any]) -> Address:
    return Address(**{name: value[name] for name in Address.__dataclass_fields__})


def _report(value: Mapping[str, Any]) -> Reached | str:
    return str(value["fault"]) if "fault" in value else Reached(**value)
