"""Which RDMA cards NCCL should not take, or cannot, and the way out: rules over values, pure.

What is wrong with a port itself is in `all.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..network.nccl_sockets import EFA_FIX
from ..report import ProbeReport
from ..topology import NEAR
from ..verdict import ProbeVerdict


def rdma_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Applies every rule about RDMA cards."""
    yield from _far_from_gpus(report)
    yield from _without_plugin(report)
    yield from _closed(report)


def _far_from_gpus(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Names working ports that no GPU is near, where others have one: they are storage's, most often."""
    if "NCCL_IB_HCA" in report.software.variables:
        return
    numbers = {node.name: number for number, node in enumerate(report.topology.nodes) if node.label.startswith("NIC")}
    gpus = [number for number, node in enumerate(report.topology.nodes) if node.label.startswith("GPU")]
    near: list[str] = []
    far: list[tuple[int, str]] = []
    for position, card in enumerate(report.rdma):
        works = card.may_open and any(port.state == "ACTIVE" for port in card.ports)
        if card.kind == "EFA" or card.name not in numbers or not works:
            continue
        paths = report.topology.paths[numbers[card.name]]
        if card.name in report.topology.beside_other_gpus or any(paths[gpu] in NEAR for gpu in gpus):
            near.append(card.name)
        else:
            far.append((position, card.name))
    if near and far:
        names = [name for _, name in far]
        yield ProbeVerdict(
            level="note",
            text=f"{', '.join(names)}: no GPU near, as is usual of ports for storage; NCCL may take them too",
            fix=f"`NCCL_IB_HCA=^={','.join(names)}` keeps NCCL off",
            path=f"rdma.{far[0][0]}",
        )


def _without_plugin(report: ProbeReport) -> Iterator[ProbeVerdict]:
    if {"NCCL_NET", "NCCL_NET_PLUGIN"} & report.software.variables.keys():
        return
    cards = [
        (position, card)
        for position, card in enumerate(report.rdma)
        if card.kind == "EFA" and card.may_open and any(port.state == "ACTIVE" for port in card.ports)
    ]
    if cards and report.gpus and report.nccl_net_plugin is None:
        count = f"{len(cards)} EFA device{'' if len(cards) == 1 else 's'}"
        yield ProbeVerdict(
            level="note",
            text=f"{count}, and the loader finds no libnccl-net.so: NCCL takes TCP between hosts",
            fix=EFA_FIX,
            path=f"rdma.{cards[0][0]}",
        )


def _closed(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Tells of working cards that /sys shows and programs here cannot open, as in most containers."""
    cards = [
        (position, card)
        for position, card in enumerate(report.rdma)
        if not card.may_open and any(port.state == "ACTIVE" for port in card.ports)
    ]
    if cards and report.gpus:
        names = ", ".join(card.name for _, card in cards)
        yield ProbeVerdict(
            level="note",
            text=f"{names}: programs here cannot open {'it' if len(cards) == 1 else 'them'} (/dev/infiniband): "
            "NCCL takes others, or TCP, between hosts",
            fix="`docker run --device /dev/infiniband --ulimit memlock=-1`; of pods the resource of the RDMA plugin",
            path=f"rdma.{cards[0][0]}.may_open",
        )
