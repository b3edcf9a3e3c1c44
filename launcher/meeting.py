"""Where the ranks of a job meet: the address of the first host that all hosts reach, and each host's way to it.

Nothing is guessed from names or routes. The first host listens on each of its addresses, all others try all of them,
and what they report decides; see reachability for both ends. The ports are closed again before the job: the agent
listens anew, and what was proved is that the network lets connections through.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface
from typing import Any

from dsrun.errors import PreflightError, Problem

from .excerpts import listed
from .host_addresses import Address
from .hosts import HostSpec
from .reachability import REACH_PATIENCE_S, Reached
from .survey import Survey, Told, Unable

#: Once one address is reached, for the others: a single lost packet is repeated within it. Black-holed addresses of
#: hosts with several networks would otherwise cost every launch the whole patience.
_REST_S = 1.2
#: For a host to answer beyond what it waits for.
ANSWER_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet.

    Attributes:
        address: of the first host; goes into MASTER_ADDR.
        interfaces: by host, the interface that leads there, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; empty for
            a job of one host, and without a host whose end of the connection is no interface's.
    """

    address: str
    interfaces: dict[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """How hosts meet.

    Attributes:
        meeting: where.
        ends: by host but the first, its own address on the way there.
    """

    meeting: Meeting
    ends: dict[str, str]


#: What a host reports of each address: how it was reached, or why not.
Report = Mapping[str, Reached | str]


def choose_meeting(survey: Survey, hosts: Sequence[HostSpec], *, iface: str | None = None) -> Meeting:
    """Asks the hosts where they can meet.

    Args:
        survey: open to all of them.
        hosts: of the job, in rank order; not empty.
        iface: interfaces of the first host to meet at, `ib0` or `ib0,eth0`, the best first; None takes the fastest.

    Raises:
        PreflightError: a host does not answer, or no address is reached by all; shows who reached what.
    """
    return find_meeting(survey, hosts, iface=iface).meeting


def find_meeting(survey: Survey, hosts: Sequence[HostSpec], *, iface: str | None = None) -> Found:
    """Does what `choose_meeting` does, and tells more of it."""
    first, *others = [host.name for host in hosts]
    if not others:
        return Found(Meeting("127.0.0.1", {}), {})
    word = secrets.token_hex(16)
    names = None if iface is None else [name.strip() for name in iface.split(",") if name.strip()]
    heard = survey.ask("listen", {"word": word, "interfaces": names}, of=[first])[first]
    if isinstance(heard, Unable):
        raise PreflightError(f"host {first}: {heard.reason}", hint=heard.hint)
    offers = [_address(offer) for offer in heard.value["offers"]]
    left_out = [_address(entry) for entry in heard.value["left_out"]]
    targets = [{"address": offer["address"], "port": offer["port"], "word": word} for offer in heard.value["offers"]]
    asked = {"targets": targets, "patience_s": REACH_PATIENCE_S, "rest_s": _REST_S}
    answers = survey.ask("reach", asked, of=others, patience_s=REACH_PATIENCE_S + ANSWER_PATIENCE_S)
    silent = [
        Problem(f"host {name}: {answer.reason}", answer.hint)
        for name, answer in answers.items()
        if isinstance(answer, Unable)
    ]
    if silent:
        raise PreflightError.of(silent)
    reports = {
        name: {offer.address: _report(entry) for offer, entry in zip(offers, answer.value, strict=True)}
        for name, answer in answers.items()
        if isinstance(answer, Told)
    }
    meeting = decide(first, offers, reports, left_out=left_out, in_order=names is not None)
    ways = {name: report[meeting.address] for name, report in reports.items()}
    return Found(meeting, {name: way.source for name, way in ways.items() if isinstance(way, Reached)})


def decide(
    first: str,
    offers: Sequence[Address],
    reports: Mapping[str, Report],
    *,
    left_out: Sequence[Address] = (),
    in_order: bool = False,
) -> Meeting:
    """Chooses the best of the addresses that all hosts reached.

    The fastest link comes first (the slowest end of it counts, an unknown one last), then an address that no router
    stands before, then IPv4, then the order of the offers. IPv4 addresses that the host gave itself come last.

    Args:
        first: the host whose addresses they are.
        offers: what it listened on.
        reports: what every other host says of each address.
        left_out: addresses nobody tried, and why, for the error.
        in_order: the user named the interfaces: the order of the offers decides alone.

    Raises:
        PreflightError: no address is reached by all.
    """
    fit = [offer for offer in offers if all(isinstance(report[offer.address], Reached) for report in reports.values())]
    if not fit:
        raise _nowhere(first, offers, reports, left_out)
    best = fit[0] if in_order else min(fit, key=lambda offer: _rank(offer, reports))
    interfaces = {first: best.interface}
    for name, report in reports.items():
        reached = report[best.address]
        if isinstance(reached, Reached) and reached.interface is not None:
            interfaces[name] = reached.interface
    return Meeting(best.address, interfaces)


def _rank(offer: Address, reports: Mapping[str, Report]) -> tuple[bool, int, bool, bool]:
    """Sorts the better first."""
    ends = [end for report in reports.values() if isinstance(end := report[offer.address], Reached)]
    speeds = [offer.speed_mbit, *(end.speed_mbit for end in ends)]
    slowest = min(speed or 0 for speed in speeds)
    parsed = ip_address(offer.address)
    network = None if offer.prefix is None else ip_interface(f"{offer.address}/{offer.prefix}").network
    is_near = network is not None and all(ip_address(end.source) in network for end in ends)
    return parsed.is_link_local, -slowest, not is_near, parsed.version == 6


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
    return Address(**{key: value[key] for key in ("address", "interface", "prefix", "speed_mbit", "unfit")})


def _report(value: Mapping[str, Any]) -> Reached | str:
    return str(value["fault"]) if "fault" in value else Reached(**value)
