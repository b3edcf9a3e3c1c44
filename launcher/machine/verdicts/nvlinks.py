"""What of NVLinks, NVSwitches and the access between GPUs is not as it should be, and the way out. Pure.

[Note: fabric] On boards with NVSwitches the fabric manager trains the links, and CUDA does not start before (error
802, system not yet initialized). What shows that it has not:

- A100 (NVSwitch 2): no link is up; there is no fabric state. New jobs fail too once it has ended.
- H100, H200 (NVSwitch 3): the fabric state of a GPU is not `completed`, and links may be down. Once GPUs are
  registered, they work on without it, until the next reset.
- B200 and later (NVSwitch 4): the same, but the switches are no devices of this driver.
- Virtual machines with a part of a board see no switches, and a GPU alone in one has no link up and no fabric; in MIG
  mode links are down too. Neither waits for anything.

Source: Fabric Manager User Guide (ABORT_CUDA_JOBS_ON_FM_EXIT, MIG, virtualization models), NVML (nvmlGpuFabricInfo_t).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..gpus.nvlink import NvLinks
from ..gpus.read import Gpu
from ..report import ProbeReport
from ..verdict import ProbeVerdict, Remark

_NO_ACCESS = {
    "CNS": "not with this chipset",
    "GNS": "not with these GPUs",
    "TNS": "not where they are plugged in",
    "DR": "switched off in the driver",
    "NS": "not supported",
}
#: Of a GPU's name: cards for consumers, to whose memory no other card has access, whatever the board.
CONSUMER = ("GeForce", "TITAN")
#: The GPU shares memory and address translation with a Grace CPU: no PCIe between them, and an IOMMU that is always on.
_COHERENT = ("GH200", "GB200", "GB300", "GB10", "Grace")


def fabric_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Yields what is wrong with the fabric of the whole machine. See [Note: fabric]."""
    manager, switches = report.topology.fabric_manager, report.topology.nvswitches
    linked = [gpu for gpu in report.gpus if gpu.nvlink is not None and _counted(gpu)]
    if manager is None or not linked:
        return
    links = [gpu.nvlink for gpu in linked if gpu.nvlink is not None]
    driver = report.driver or "the driver's version"
    other = None if report.driver is None or manager.version in (None, report.driver) else manager.version
    same = f", of version {driver}" + ("" if other is None else f" (installed is {other})")
    if is_untrained(report):
        text = f"{switches} NVSwitches and no NVLink up: CUDA does not start (error 802)"
        fix = f"`systemctl enable --now nvidia-fabricmanager`{same}"
        if manager.running:
            text = f"{switches} NVSwitches, the fabric manager runs, no NVLink is up: CUDA does not start (error 802)"
            fix = f"why: `journalctl -u nvidia-fabricmanager`; restart it{same}"
        yield ProbeVerdict(level="red", text=text, fix=fix, path="topology.fabric_manager.running")
    elif manager.running is False:
        registered = all(link.fabric == "completed" for link in links)
        text = "the fabric manager does not run: CUDA does not start (error 802)"
        if registered:
            text = "the fabric manager does not run: after the next reset of a GPU CUDA does not start (error 802)"
        fix = f"`systemctl enable --now nvidia-fabricmanager`{same}"
        level = "amber" if registered else "red"
        yield ProbeVerdict(level=level, text=text, fix=fix, path="topology.fabric_manager.running")
    elif other is not None:
        text = f"fabric manager {other} beside driver {driver}: it starts with its own version only"
        fix = f"install version {driver} of it, then restart it"
        yield ProbeVerdict(level="amber", text=text, fix=fix, path="topology.fabric_manager.version")


def is_untrained(report: ProbeReport) -> bool:
    """Whether NVSwitches are here, and of the GPUs that have links none has one up."""
    links = [gpu.nvlink for gpu in report.gpus if gpu.nvlink is not None and _counted(gpu)]
    return report.topology.nvswitches > 0 and bool(links) and not any(link.active for link in links)


def link_remarks(gpu: Gpu, links: NvLinks, *, switches: int, untrained: bool, virtual: bool | None) -> Iterator[Remark]:
    """Yields what is wrong with one GPU's links.

    Args:
        gpu: GPU that has the links.
        links: its links.
        switches: NVSwitches that are seen here.
        untrained: whether it was said of the whole machine that no link is up.
        virtual: whether this is a virtual machine; None if nobody knows.
    """
    # A GPU given to a virtual machine alone has no link up, sees no switch, and waits for no fabric.
    in_fabric = links.active > 0 or (switches > 0 and _counted(gpu))
    # Of Blackwell's board no switch is seen on the machine itself either.
    needs_fabric = in_fabric or (virtual is False and _counted(gpu))
    if needs_fabric and links.fabric in ("not started", "in progress") and not untrained:
        text = f"waiting for the NVSwitch fabric ({links.fabric}): CUDA does not start (error 802)"
        yield "red", text, "`systemctl start nvidia-fabricmanager`, of the driver's version", "nvlink.fabric"
    if needs_fabric and links.fabric_error is not None:
        text = f"refused by the NVSwitch fabric ({links.fabric_error}): CUDA does not start (error 802)"
        fix = "why: `journalctl -u nvidia-fabricmanager`; reset it (`nvidia-smi -r -i GPU_INDEX`) or reboot"
        yield "red", text, fix, "nvlink.fabric_error"
    # A card without its bridge has all links down, and is as it was bought.
    if links.inactive and (links.active or (in_fabric and not untrained)):
        text = f"with {links.inactive} of {links.active + links.inactive} NVLinks down"
        yield "amber", text, "`nvidia-smi nvlink -s -i GPU_INDEX`; reset it, or have it serviced", "nvlink.inactive"
    if links.errors:
        text = f"with {links.errors} errors on its NVLinks"
        yield "note", text, "`nvidia-smi nvlink -e -i GPU_INDEX`; have it serviced if they grow", "nvlink.errors"


def access_remarks(gpu: Gpu, *, virtual: bool | None) -> Iterator[Remark]:
    """Yields that a GPU has no access to the memory of others, and what can be done about it on this kind of machine.

    Args:
        gpu: GPU with its `peer_access`, which is judged.
        virtual: whether this is a virtual machine; None if nobody knows.
    """
    refused = {word for word in gpu.peer_access if word in _NO_ACCESS}
    # Slices of a GPU in MIG mode never have any.
    if not refused or (gpu.state is not None and gpu.state.mig_enabled):
        return
    reason = ", ".join(_NO_ACCESS[word] for word in sorted(refused))
    text = f"without access to the memory of other GPUs ({reason}): copies go through the host"
    if "DR" in refused:
        fix = "remove what switches it off from the driver's options: `grep -r nvidia /etc/modprobe.d`"
        yield "amber", text, fix, "peer_access"
    elif is_coherent(gpu):
        yield "note", text, "nothing: chips without NVLink between them are built so", "peer_access"
    elif refused <= {"GNS", "NS"} or is_named(gpu, CONSUMER):
        yield "note", text, "nothing: these cards cannot", "peer_access"
    elif virtual:
        yield "note", text, "nothing from here: the host of this virtual machine decides", "peer_access"
    else:
        fix = "switch PCIe's ACS and the IOMMU off in the firmware, then look again: `nvidia-smi topo -p2p r`"
        yield "amber", text, fix, "peer_access"


def iommu_remarks(gpu: Gpu, *, arch: str, virtual: bool | None) -> Iterator[Remark]:
    """Yields that an IOMMU stands between this GPU and others.

    Args:
        gpu: one of several.
        arch: machine type, as `uname -m` says it.
        virtual: whether this is a virtual machine, where the IOMMU is not the one between its GPUs; None if nobody
            knows.
    """
    if virtual or is_coherent(gpu) or gpu.iommu is None or not gpu.iommu.startswith("DMA"):
        return
    # Copies between GPUs that have no access to each other go through the host anyhow.
    if set(gpu.peer_access) & set(_NO_ACCESS) and "OK" not in gpu.peer_access:
        return
    if arch in ("aarch64", "arm64"):
        # It is always on there, and whether this is a virtual machine cannot be told.
        text = f"behind an SMMU that translates ({gpu.iommu}): copies between GPUs may be slow"
        yield "note", text, "`iommu.passthrough=1` on the kernel's command line", "iommu"
    else:
        text = f"behind an IOMMU that translates ({gpu.iommu}): copies between GPUs are slow or hang"
        yield "amber", text, "`iommu=pt` on the kernel's command line, or off in the firmware", "iommu"


def is_coherent(gpu: Gpu) -> bool:
    """Whether a GPU shares its memory with a Grace CPU."""
    return is_named(gpu, _COHERENT)


def is_named(gpu: Gpu, words: tuple[str, ...]) -> bool:
    """Whether a GPU's name has one of some words."""
    return gpu.name is not None and any(word in gpu.name for word in words)


def _counted(gpu: Gpu) -> bool:
    """Whether a GPU has links that should be up: in MIG mode they are down."""
    links = gpu.nvlink
    in_slices = gpu.state is not None and bool(gpu.state.mig_enabled)
    return links is not None and links.active + links.inactive > 0 and not in_slices
