"""Which RDMA cards NCCL should not take, or cannot, and the way out: rules over values, pure.

What is wrong with a port itself is in `all.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..network.interfaces import RdmaDevice
from ..network.nccl_sockets import NET_VARIABLES, NcclLibraries, why_no_sockets
from ..report import ProbeReport
from ..topology import NEAR
from ..verdict import Context, ProbeVerdict


def rdma_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Applies every rule about RDMA cards."""
    yield from _far_from_gpus(report)
    if report.gpus:
        plugin, variables = report.nccl_net_plugin, report.software.variables
        yield from efa_verdicts(report.rdma, net_plugin=plugin, variables=variables, context=Context())
    yield from _closed(report)


def efa_verdicts(
    cards: Sequence[RdmaDevice], *, net_plugin: str | None, variables: Collection[str], context: Context
) -> Iterator[ProbeVerdict]:
    """Judges whether NCCL takes the EFA devices of a host with GPUs.

    Args:
        cards: all that do RDMA there.
        net_plugin: path of the plugin by which it would; None where the loader finds none.
        variables: names of the environment variables that ranks have.
        context: the jobs; those whose ranks talk over NCCL between hosts are slowed down.
    """
    if net_plugin is not None or not set(NET_VARIABLES).isdisjoint(variables):
        return
    efa = [position for position, card in enumerate(cards) if card.kind == "EFA" and card.works]
    if efa:
        count = f"{len(efa)} EFA device{'' if len(efa) == 1 else 's'}"
        yield ProbeVerdict(
            level="amber" if context.crosses_hosts else "note",
            text=f"{count}, and the loader finds no libnccl-net.so: NCCL takes TCP between hosts",
            fix="install AWS's EFA software (aws-ofi-nccl, /opt/amazon/efa), also in images; LD_LIBRARY_PATH leads to "
            "its plugin",
            path=f"rdma.{efa[0]}",
        )


def takes_rdma(report: ProbeReport) -> bool:
    """Whether ranks of a host that talk over NCCL do so over RDMA."""
    libraries = NcclLibraries(net_plugin=report.nccl_net_plugin, verbs=report.nccl_verbs)
    return why_no_sockets(report.software.variables, report.rdma, libraries=libraries) is not None


def _far_from_gpus(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Names working ports that no GPU is near, where others have one: they are storage's, most often."""
    if "NCCL_IB_HCA" in report.software.variables:
        return
    numbers = {node.name: number for number, node in enumerate(report.topology.nodes) if node.label.startswith("NIC")}
    gpus = [number for number, node in enumerate(report.topology.nodes) if node.label.startswith("GPU")]
    near: list[str] = []
    far: list[tuple[int, str]] = []
    for position, card in enumerate(report.rdma):
        if card.kind == "EFA" or card.name not in numbers or not card.works:
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


def _closed(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Tells of working cards that /sys shows and programs here cannot open, as in most containers."""
    cards = [(position, card) for position, card in enumerate(report.rdma) if card.is_up and not card.may_open]
    if cards and report.gpus:
        names = ", ".join(card.name for _, card in cards)
        yield ProbeVerdict(
            level="note",
            text=f"{names}: programs here cannot open {'it' if len(cards) == 1 else 'them'} (/dev/infiniband): "
            "NCCL takes others, or TCP, between hosts",
            fix="`docker run --device /dev/infiniband --ulimit memlock=-1`; of pods the resource of the RDMA plugin",
            path=f"rdma.{cards[0][0]}.may_open",
        )
