"""How GPUs and network cards of one machine reach each other: the matrix of `nvidia-smi topo -m`, as a value.

Put together from what the other probes read; asks nothing itself. How it is drawn stands in topology_text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.host.gpu_presence import nvidia_presence

from .gpus.fabric_manager import FabricManager, read_fabric_manager
from .gpus.nvlink import links_between
from .gpus.read import Gpu
from .gpus.xids import SwitchEvent
from .network.interfaces import RdmaDevice
from .pci import PciPlace, path_class, place_of_address, read_number
from .proc_files import is_there, read_text

#: On one switch, or on switches below one bridge: the way on which a card reaches GPU memory itself.
NEAR = ("PIX", "PXB")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyNode:
    """One GPU or network card.

    Attributes:
        label: `GPU0`, `NIC0`.
        name: the card's, `mlx5_0`; a GPU's UUID.
        address: PCI address.
        numa_node: the node it is wired to.
        cpus: CPUs of the NUMA node that the device is wired to, as the kernel lists them; None where the node is
            unknown.
    """

    label: str
    name: str | None
    address: str | None
    numa_node: int | None
    cpus: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Who reaches whom over what.

    Attributes:
        nodes: GPUs first, then network cards.
        paths: a row a node, a column a node: `X`, `NV18`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`, or `?` where a place is
            unknown.
        nvswitches: NVSwitch chips that are seen; a virtual machine may not see those it uses, and those of Blackwell
            are no devices of the GPU's driver.
        beside_other_gpus: network cards near a GPU that this process does not see: another job has it, or none.
        fabric_manager: service that sets the NVSwitches up; None where no switches are seen.
        switch_events: errors of the switches that the driver wrote to the kernel's log; None where that is closed.
        peermem: nvidia_peermem is loaded, by which network cards reach GPU memory.
        gdrcopy: the module of GDRCopy is loaded.
        iommu_groups: number of groups that the IOMMU made; 0 if it is off, None where the kernel does not show them.
    """

    nodes: tuple[TopologyNode, ...]
    paths: tuple[tuple[str, ...], ...]
    nvswitches: int
    peermem: bool
    gdrcopy: bool
    iommu_groups: int | None
    beside_other_gpus: tuple[str, ...] = ()
    fabric_manager: FabricManager | None = None
    switch_events: tuple[SwitchEvent, ...] | None = ()


def read_topology(
    root: Path,
    gpus: Sequence[Gpu],
    cards: Sequence[RdmaDevice],
    node_cpus: Mapping[int, str],
    *,
    switch_events: tuple[SwitchEvent, ...] | None = (),
) -> Topology:
    """Puts the matrix together.

    Args:
        root: `/`, or a made-up tree.
        gpus: GPUs of this machine, with their PCI addresses and links.
        cards: network cards that do RDMA; others play no part between GPUs.
        node_cpus: NUMA node -> its CPUs.
        switch_events: errors of NVSwitches that the driver wrote to the kernel's log; None where that is closed. See
            `Topology`.
    """
    nvswitches = _count(root / "proc/driver/nvidia-nvswitch/devices") or 0
    members = [(f"GPU{gpu.index}", gpu.uuid, gpu.pci_address, gpu) for gpu in gpus]
    members += [(f"NIC{index}", card.name, card.pci_address, None) for index, card in enumerate(cards)]
    places = [None if address is None else place_of_address(root, address) for _, _, address, _ in members]
    rows = [
        tuple(
            _path(one, places[row], other, places[column], itself=row == column)
            for column, (_, _, _, other) in enumerate(members)
        )
        for row, (_, _, _, one) in enumerate(members)
    ]
    return Topology(
        nodes=tuple(
            TopologyNode(
                label=label,
                name=name,
                address=address,
                numa_node=None if place is None else place.numa_node,
                cpus=None if place is None or place.numa_node is None else node_cpus.get(place.numa_node),
            )
            for (label, name, address, _), place in zip(members, places, strict=True)
        ),
        paths=tuple(rows),
        nvswitches=nvswitches,
        peermem=is_there(root / "sys/module/nvidia_peermem") or is_there(root / "sys/module/nv_peer_mem"),
        gdrcopy=is_there(root / "sys/module/gdrdrv"),
        iommu_groups=_count(root / "sys/kernel/iommu_groups"),
        beside_other_gpus=_beside_other_gpus(root, gpus, cards),
        fabric_manager=read_fabric_manager(root) if nvswitches else None,
        switch_events=switch_events,
    )


def iommu_kind(root: Path, address: str) -> str | None:
    """Returns the kind of the IOMMU's domain for a device: `identity` translates nothing; None without an IOMMU."""
    return (read_text(root / "sys/bus/pci/devices" / address / "iommu_group/type") or "").strip() or None


def numa_node_of(root: Path, address: str) -> int | None:
    """Returns the node a device is wired to."""
    return read_number(root / "sys/bus/pci/devices" / address / "numa_node")


def _path(one: Gpu | None, place: PciPlace | None, other: Gpu | None, place_2: PciPlace | None, *, itself: bool) -> str:
    if itself:
        return "X"
    if one and other and one.nvlink and other.nvlink and one.pci_address and other.pci_address:
        links = links_between(one.nvlink, one.pci_address, other.nvlink, other.pci_address)
        if links:
            return f"NV{links}"
    return "?" if place is None or place_2 is None else path_class(place, place_2)


def _beside_other_gpus(root: Path, gpus: Sequence[Gpu], cards: Sequence[RdmaDevice]) -> tuple[str, ...]:
    ours = {gpu.pci_address for gpu in gpus}
    others = [place_of_address(root, address) for address in nvidia_presence(root).cards if address not in ours]
    return tuple(
        card.name
        for card in cards
        if card.pci_address is not None
        and (place := place_of_address(root, card.pci_address)) is not None
        and any(other is not None and path_class(place, other) in NEAR for other in others)
    )


def _count(folder: Path) -> int | None:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return None
