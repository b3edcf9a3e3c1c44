"""Whether interfaces and ports are up, and Gloo finds one: rules over a report, pure. RDMA itself is judged in rdma."""

from __future__ import annotations

from collections.abc import Iterator

from ..report import ProbeReport
from ..verdict import ProbeVerdict


def network_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Judges the interfaces of a host and the ports of its cards."""
    yield from _ports(report)
    # What is said of a card's port is not said of its interface again.
    cards = {card.interface for card in report.rdma}
    down = [(number, link) for number, link in enumerate(report.network) if link.state == "down"]
    fix = "check cable and switch: `ip link`, `ethtool`"
    for number, link in down:
        if link.addresses and link.interface not in cards:
            text = f"{link.interface} down, with address {link.addresses[0]}"
            yield ProbeVerdict(level="amber", text=text, fix=fix, path=f"network.{number}.state")
    spare = [(number, link) for number, link in down if not link.addresses and link.interface not in cards]
    if spare:
        text = f"{', '.join(link.interface for _, link in spare)} down"
        yield ProbeVerdict(level="note", text=text, fix=fix, path=f"network.{spare[0][0]}.state")
    if report.gloo_interface == "lo" and report.network:
        text = f"/etc/hosts gives {report.host.name} a loopback address: Gloo listens where no other host reaches"
        fix = "dsrun sets GLOO_SOCKET_IFNAME for jobs of several hosts; set it where you start torch otherwise"
        yield ProbeVerdict(level="note", text=text, fix=fix, path="gloo_interface")


def _ports(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Ports in the same state share a line."""
    idle: dict[tuple[str, str | None, bool], list[tuple[str, str]]] = {}
    for number, card in enumerate(report.rdma):
        for index, port in enumerate(card.ports):
            if port.state is not None and not port.is_up:
                path = f"rdma.{number}.ports.{index}.state"
                key = (port.state, port.physical, port.layer == "InfiniBand")
                idle.setdefault(key, []).append((f"{card.name}:{port.number}", path))
    for (state, physical, infiniband), ports in idle.items():
        fix = "check cable and switch: `ibstat`, `rdma link`"
        if state == "INIT" and infiniband:
            fix = "start a subnet manager (opensm) in the fabric"
        told = "" if physical is None else f" ({physical})"
        names = ", ".join(name for name, _ in ports)
        text = f"{names} {state}{told}: NCCL does not use {'it' if len(ports) == 1 else 'them'}"
        yield ProbeVerdict(level="amber", text=text, fix=fix, path=ports[0][1])
