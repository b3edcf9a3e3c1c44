"""What of GPUs and the links between them is not as it should be, and the way out: rules over values, pure.

GPUs of which the same is to be said share a line: eight idle GPUs are one note, not eight.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..gpus.left_out import gpus_in_words, left_out_gpus
from ..gpus.read import Gpu
from ..gpus.state import GpuState
from ..pci import PcieLink
from ..report import ProbeReport
from ..verdict import Context, ProbeVerdict, Remark
from .gpu_use import use_remarks
from .left_out import left_out_verdicts
from .no_gpus import hidden_gpu_verdicts, no_gpu_verdicts
from .nvlinks import CONSUMER, access_remarks, fabric_verdicts, iommu_remarks, is_named, is_untrained, link_remarks
from .xids import recovery_remarks, switch_verdicts, xid_remarks

_SLOWED = frozenset(
    {"hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake", "board limit", "reliability"}
)
#: Of a GPU's name: those of laptops, which are soldered to the lanes that they have, often half of what they could use.
_SOLDERED = ("Laptop", "Max-Q", "Mobile")


def gpu_verdicts(report: ProbeReport) -> list[ProbeVerdict]:
    """Applies every rule about GPUs, in the order of the GPUs."""
    said: dict[Remark, list[int]] = {}
    for gpu in report.gpus:
        for remark in _remarks(gpu, report):
            said.setdefault(remark, []).append(gpu.index)
    found = [
        ProbeVerdict(
            level=level,
            text=f"{gpus_in_words(indices)} {text}",
            fix=fix.replace("GPU_INDEX", ",".join(map(str, indices))),
            path=f"gpus.{[gpu.index for gpu in report.gpus].index(indices[0])}.{path}",
        )
        for (level, text, fix, path), indices in said.items()
    ]
    return [*fabric_verdicts(report), *_switches(report), *_left_out(report), *found, *_whole(report)]


def _left_out(report: ProbeReport) -> Iterator[ProbeVerdict]:
    if report.gpus_unusable is not None or report.gpus_idle is not None:
        # What is said of all of them names those that are left out.
        return iter(())
    states = [(gpu.index, gpu.state) for gpu in report.gpus if gpu.state is not None]
    uncut = [index for index, state in states if state.mig_enabled and not state.mig_slices]
    left_out = left_out_gpus(report.gpus_left_out, uncut=uncut, unlisted=report.gpus_unlisted)
    return left_out_verdicts(left_out, context=Context())


def _switches(report: ProbeReport) -> Iterator[ProbeVerdict]:
    are_well = bool(report.gpus) and all(
        gpu.state is not None
        and gpu.state.recovery_action == "none"
        and gpu.nvlink is not None
        and gpu.nvlink.active > 0
        and not gpu.nvlink.inactive
        for gpu in report.gpus
    )
    return switch_verdicts(report.topology.switch_events or (), gpus_are_well=are_well)


def _whole(report: ProbeReport) -> Iterator[ProbeVerdict]:
    yield from no_gpu_verdicts(report.gpus_unusable, report.gpus_idle, context=Context())
    yield from hidden_gpu_verdicts(
        gpus=len(report.gpus),
        usable=report.gpus_usable,
        variables=report.software.variables,
        unusable=report.gpus_unusable,
    )
    # EFA reaches GPU memory by other means.
    cards = [card for card in report.rdma if card.kind in ("InfiniBand", "RoCE")]
    if report.gpus and any(card.is_up for card in cards) and not report.topology.peermem:
        text = "nvidia_peermem is not loaded: without dma-buf, network cards reach GPU memory through the host's"
        yield ProbeVerdict(level="note", text=text, fix="`modprobe nvidia_peermem`", path="topology.peermem")


def _remarks(gpu: Gpu, report: ProbeReport) -> Iterator[Remark]:
    if gpu.state is not None:
        yield from recovery_remarks(gpu.state)
    if gpu.pcie is not None:
        shares_lanes = len(report.gpus) > 1 and is_named(gpu, CONSUMER)
        yield from _link(gpu.pcie, shares_lanes=shares_lanes, is_soldered=is_named(gpu, _SOLDERED))
    if gpu.nvlink is not None:
        switches, untrained = report.topology.nvswitches, is_untrained(report)
        yield from link_remarks(gpu, gpu.nvlink, switches=switches, untrained=untrained, virtual=report.host.virtual)
    yield from xid_remarks(gpu.xid_events or (), gpu.state)
    if len(report.gpus) > 1:
        yield from iommu_remarks(gpu, arch=report.host.arch, virtual=report.host.virtual)
    yield from access_remarks(gpu, virtual=report.host.virtual)
    if gpu.state is not None:
        yield from _health(gpu.state)
        yield from _modes(gpu.state)
        yield from _others(gpu, gpu.state, report.host.user)


def _link(link: PcieLink, *, shares_lanes: bool, is_soldered: bool) -> Iterator[Remark]:
    """Yields what a GPU's link to the board lacks; boards of desktops give two cards half of the lanes each."""
    now, most = (link.generation, link.width), (link.generation_max, link.width_max)
    if None in (*now, *most) or now == most:
        return
    text = f"PCIe gen{now[0]} x{now[1]} of gen{most[0]} x{most[1]}"
    if is_soldered and link.width != link.width_max:
        yield "note", text, "nothing: laptops are built so", "pcie.width"
    elif shares_lanes and (link.width, link.width_max) == (8, 16):
        yield "note", text, "nothing: most desktop boards share 16 lanes between two cards", "pcie.width"
    elif link.width != link.width_max:
        yield "amber", text, "reseat the card or its riser; look up the slot's lanes and its bifurcation", "pcie.width"
    else:
        fix = "nothing, if it rises under load: `dsrun probe --bench`"
        yield "note", f"{text}: idle GPUs lower it", fix, "pcie.generation"


def _health(state: GpuState) -> Iterator[Remark]:
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


def _modes(state: GpuState) -> Iterator[Remark]:
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
    if state.compute_mode in ("exclusive process", "exclusive thread"):
        text = f"open to one process at a time (compute mode {state.compute_mode})"
        text += ": ranks that share it fail, `busy or unavailable`, unless MPS runs"
        yield "note", text, "one rank a GPU, or `nvidia-smi -c DEFAULT -i GPU_INDEX`", "state.compute_mode"


def _others(gpu: Gpu, state: GpuState, user: str) -> Iterator[Remark]:
    """Yields who else is on a GPU. One's own processes are no strangers, and who is not to be seen may be one's own."""
    strangers = [one for one in state.processes or () if one.counts and one.user not in (None, user)]
    return use_remarks(
        [one.label for one in strangers],
        free_bytes=gpu.memory_free_bytes,
        total_bytes=gpu.memory_total_bytes,
        context=Context(),
    )
