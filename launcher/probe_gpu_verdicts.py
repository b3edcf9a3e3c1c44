"""What of GPUs and the links between them is not as it should be, and the way out: rules over values, pure.

GPUs of which the same is to be said share a line: eight idle GPUs are one note, not eight.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.units import format_bytes

from .probe_gpu import Gpu
from .probe_gpu_state import GpuState
from .probe_pci import PcieLink
from .probe_report import Level, ProbeReport, ProbeVerdict

#: Xids of the GPU or its links; most others are a program's own doing (13, 31, 43, 45).
#: Source: docs.nvidia.com/deploy/xid-errors.
_XIDS: dict[int, tuple[Level, str]] = {
    48: ("red", "double-bit memory error"),
    62: ("amber", "internal micro-controller halted"),
    63: ("amber", "memory row remapped"),
    64: ("red", "memory row could not be remapped"),
    74: ("red", "NVLink error"),
    79: ("red", "fell off the bus"),
    92: ("amber", "many single-bit memory errors"),
    94: ("amber", "contained memory error"),
    95: ("red", "uncontained memory error"),
    119: ("red", "GSP does not answer"),
    120: ("red", "GSP error"),
    140: ("red", "unrecovered memory error"),
}
_SLOWED = frozenset(
    {"hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake", "board limit", "reliability"}
)
_NO_ACCESS = {
    "CNS": "not with this chipset",
    "GNS": "not with these GPUs",
    "TNS": "not where they are plugged in",
    "DR": "switched off in the driver",
    "NS": "not supported",
}
#: Monitors keep less.
_LITTLE_BYTES = 100 << 20

#: Level, what of GPUs it is said (after "GPU 3" or "GPUs 0-7", so without a verb), way out, path below `gpus.N`.
_Remark = tuple[Level, str, str, str]


def gpu_verdicts(report: ProbeReport) -> list[ProbeVerdict]:
    """Applies every rule about GPUs, in the order of the GPUs."""
    said: dict[_Remark, list[int]] = {}
    for gpu in report.gpus:
        for remark in _remarks(gpu, user=report.host.user, many=len(report.gpus) > 1, virtual=report.host.virtual):
            said.setdefault(remark, []).append(gpu.index)
    found = [
        ProbeVerdict(
            level=level,
            text=f"{_named(indices)} {text}",
            fix=fix.replace("GPU_INDEX", ",".join(map(str, indices))),
            path=f"gpus.{[gpu.index for gpu in report.gpus].index(indices[0])}.{path}",
        )
        for (level, text, fix, path), indices in said.items()
    ]
    return [*found, *_whole(report)]


def _whole(report: ProbeReport) -> Iterator[ProbeVerdict]:
    if report.gpus and report.gpus_usable == 0:
        text = "CUDA_VISIBLE_DEVICES hides every GPU from jobs"
        yield ProbeVerdict(level="amber", text=text, fix="`unset CUDA_VISIBLE_DEVICES`", path="gpus_usable")
    works = any(port.state == "ACTIVE" for card in report.rdma for port in card.ports)
    if report.gpus and works and not report.topology.peermem:
        text = "nvidia_peermem is not loaded: without dma-buf, network cards reach GPU memory through the host's"
        yield ProbeVerdict(level="note", text=text, fix="`modprobe nvidia_peermem`", path="topology.peermem")


def _remarks(gpu: Gpu, *, user: str, many: bool, virtual: bool | None) -> Iterator[_Remark]:
    if gpu.lost:
        fix = "`nvidia-smi -r` or reboot; look at power, seat and `dmesg | grep -i nvrm`; exchange it if it comes back"
        yield "red", "lost: the driver counts it and cannot reach it", fix, "lost"
    if gpu.pcie is not None:
        yield from _link(gpu.pcie)
    if gpu.nvlink is not None:
        links = gpu.nvlink
        # With no link up a GPU was given to a virtual machine alone, and waits for no fabric.
        if links.active and links.fabric is not None and links.fabric != "completed":
            fix = "`systemctl start nvidia-fabricmanager`, of the driver's version"
            yield "red", f"waiting for the NVSwitch fabric ({links.fabric}): CUDA does not start", fix, "nvlink.fabric"
        # A card without its bridge has all links down, and is as it was bought.
        if links.active and links.inactive:
            text = f"with {links.inactive} of {links.active + links.inactive} NVLinks down"
            yield "amber", text, "`nvidia-smi nvlink -s -i GPU_INDEX`; reset it, or have it serviced", "nvlink.inactive"
    if gpu.nvlink is not None and gpu.nvlink.errors:
        text = f"with {gpu.nvlink.errors} errors on its NVLinks"
        yield "note", text, "`nvidia-smi nvlink -e -i GPU_INDEX`; have it serviced if they grow", "nvlink.errors"
    for xid in dict.fromkeys(gpu.xids or ()):
        if xid in _XIDS:
            level, text = _XIDS[xid]
            yield level, f"Xid {xid}: {text}", "`nvidia-smi -r -i GPU_INDEX` or reboot; `dcgmi diag -r 3`", "xids"
    if many and not virtual and gpu.iommu is not None and gpu.iommu.startswith("DMA"):
        text = f"behind an IOMMU that translates ({gpu.iommu}): copies between GPUs are slow or hang"
        yield "amber", text, "`iommu=pt` on the kernel's command line, or off in the firmware", "iommu"
    refused = {word for word in gpu.peer_access if word in _NO_ACCESS}
    if refused:
        # Consumer cards have none: nothing is broken then.
        why = ", ".join(_NO_ACCESS[word] for word in sorted(refused))
        text = f"without access to the memory of other GPUs ({why}): copies go through the host"
        level: Level = "note" if refused <= {"GNS", "NS"} else "amber"
        fix = "nothing, where the cards cannot; else switch ACS and the IOMMU off: `nvidia-smi topo -p2p r`"
        yield level, text, fix, "peer_access"
    if gpu.state is not None:
        yield from _health(gpu.state)
        yield from _modes(gpu.state)
        yield from _others(gpu.state, user)


def _link(link: PcieLink) -> Iterator[_Remark]:
    now, most = (link.generation, link.width), (link.generation_max, link.width_max)
    if None in (*now, *most) or now == most:
        return
    text = f"PCIe gen{now[0]} x{now[1]} of gen{most[0]} x{most[1]}"
    if link.width != link.width_max:
        yield "amber", text, "reseat the card or its riser; look up the slot's lanes and its bifurcation", "pcie.width"
    else:
        fix = "nothing, if it rises under load: `dsrun probe --bench`"
        yield "note", f"{text}: idle GPUs lower it", fix, "pcie.generation"


def _health(state: GpuState) -> Iterator[_Remark]:
    diagnose = "`dcgmi diag -r 3`; reset it (`nvidia-smi -r -i GPU_INDEX`), exchange it if they come back"
    if state.remap_failed:
        text = "without a spare row left for broken memory"
        yield "red", text, "have it exchanged: `nvidia-smi -q -d ROW_REMAPPER -i GPU_INDEX`", "state.remap_failed"
    if state.remap_pending:
        text = "waiting for a reset to remap broken memory"
        yield "amber", text, "end what runs on it, then `nvidia-smi -r -i GPU_INDEX`", "state.remap_pending"
    if state.ecc_uncorrected:
        yield "red", f"with {state.ecc_uncorrected} uncorrected memory errors", diagnose, "state.ecc_uncorrected"
    slowed = [reason for reason in state.throttle_reasons or () if reason in _SLOWED]
    if slowed:
        hot = "" if state.temperature_c is None else f" at {state.temperature_c} °C"
        fix = "check fans, inlet air and power supplies: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i GPU_INDEX`"
        yield "amber", f"slowed down: {', '.join(slowed)}{hot}", fix, "state.throttle_reasons"


def _modes(state: GpuState) -> Iterator[_Remark]:
    limit, default = state.power_limit_w, state.power_limit_default_w
    if limit is not None and default is not None and limit < default:
        text = f"limited to {limit:.0f} W of {default:.0f} W"
        yield "note", text, f"`nvidia-smi -pl {default:.0f} -i GPU_INDEX`", "state.power_limit_w"
    if state.persistence is False:
        text = "persistence off: the driver starts anew for every job"
        yield "note", text, "`systemctl enable --now nvidia-persistenced`", "state.persistence"
    if state.compute_mode == "prohibited":
        text = "closed to computing (compute mode prohibited)"
        yield "red", text, "`nvidia-smi -c DEFAULT -i GPU_INDEX`", "state.compute_mode"


def _others(state: GpuState, user: str) -> Iterator[_Remark]:
    for process in state.processes or ():
        large = process.memory_bytes is None or process.memory_bytes > _LITTLE_BYTES
        if process.user is not None and process.user != user and large:
            size = "memory" if process.memory_bytes is None else format_bytes(process.memory_bytes)
            text = f"used by pid {process.pid} of user {process.user} ({size})"
            yield "amber", text, "take other GPUs: `dsrun run` does unless told otherwise", "state.processes"


def _named(indices: list[int]) -> str:
    """Returns `GPU 3`, or `GPUs 0-7`."""
    parts: list[str] = []
    for index in indices:
        first, _, last = (parts[-1] if parts else "").partition("-")
        if parts and int(last or first) + 1 == index:
            parts[-1] = f"{first}-{index}"
        else:
            parts.append(str(index))
    return f"GPU{'' if len(indices) == 1 else 's'} {','.join(parts)}"
