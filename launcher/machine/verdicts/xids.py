"""What the errors of a driver (Xids, SXids, recovery actions) mean for a job, and the way out. Pure.

Levels follow NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html): where it asks for a
reset or a reboot an error is red, where it lets work go on amber or a note. Errors that are a program's own doing (13,
31, 43, 45, 137 ...) are not spoken of: the program has failed of them already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..gpus.state import GpuState
from ..gpus.xids import SwitchEvent, XidEvent
from ..verdict import Level, ProbeVerdict, Remark

_XIDS: dict[int, tuple[Level, str]] = {
    46: ("red", "the GPU stopped processing"),
    48: ("red", "double-bit memory error"),
    54: ("red", "a power cable of the board is missing"),
    62: ("red", "internal micro-controller halted"),
    63: ("amber", "memory row remapped"),
    64: ("red", "memory row could not be remapped"),
    74: ("red", "NVLink error"),
    79: ("red", "fell off the bus"),
    92: ("amber", "many single-bit memory errors"),
    94: ("amber", "contained memory error"),
    95: ("red", "uncontained memory error"),
    109: ("red", "context switch timed out"),
    110: ("red", "security fault"),
    119: ("red", "GSP does not answer"),
    120: ("red", "GSP error"),
    121: ("note", "errors on the link to the Grace CPU, corrected"),
    136: ("red", "NVLink training failed"),
    140: ("red", "unrecovered memory error"),
    143: ("red", "the GPU could not be initialised"),
    **dict.fromkeys((144, 145, 146, 147, 148, 149, 150), ("amber", "NVLink error")),
    151: ("red", "key rotation failed (confidential computing)"),
    155: ("amber", "NVLink taken down by software"),
    156: ("amber", "broken resource retired: a reset applies it"),
    157: ("amber", "broken resource could not be retired"),
    158: ("red", "fatal time-out"),
    159: ("amber", "error on the link to the Grace CPU"),
    160: ("note", "memory channel retired"),
    161: ("amber", "memory channel could not be retired"),
    167: ("red", "fatal PCIe time-out"),
    168: ("amber", "memory errors where ECC is off: less memory"),
    169: ("red", "internal micro-controller halted"),
    171: ("red", "uncorrectable error in DRAM"),
    172: ("red", "uncorrectable error in SRAM"),
}
_ACTION_XID = 154
#: Xids of NVLink 5, whose text says how bad each is.
_WITH_FATALITY = range(144, 151)
_NOTHING = "nothing, unless it comes back: `dcgmi diag -r 3`"
_RESET = "`nvidia-smi -r -i GPU_INDEX` or reboot; `dcgmi diag -r 3`"

#: What the driver asks for, in its own words (Xid 154) and in ours (`GpuState.recovery_action`): level, text, way out.
_RESET_ACTION: tuple[Level, str, str] = (
    "red",
    "needs a reset, says the driver",
    "end what runs on it, then `nvidia-smi -r -i GPU_INDEX`",
)
_REBOOT_ACTION: tuple[Level, str, str] = (
    "red",
    "needs the machine to be rebooted, says the driver",
    "reboot; have it serviced if it comes back",
)
_DRAIN_ACTION: tuple[Level, str, str] = (
    "amber",
    "needs a reset once what runs on it has ended, says the driver",
    "let it end and start nothing new there, then `nvidia-smi -r -i GPU_INDEX`",
)
_PEERS_ACTION: tuple[Level, str, str] = (
    "amber",
    "needs its traffic with other GPUs to end, says the driver",
    "end the jobs that use it with others, then look again: `nvidia-smi -q -i GPU_INDEX`",
)
_ACTIONS: dict[str, tuple[Level, str, str]] = {
    **dict.fromkeys(("reset the GPU", "reset the bus", "GPU Reset Required", "PF FLR"), _RESET_ACTION),
    **dict.fromkeys(("reboot the node", "reboot the system", "Node Reboot Required", "OS Reboot"), _REBOOT_ACTION),
    **dict.fromkeys(("drain and reset", "Drain and Reset"), _DRAIN_ACTION),
    **dict.fromkeys(("drain peer-to-peer", "Drain P2P"), _PEERS_ACTION),
    "recover the IMEX domain": (
        "red",
        "needs its IMEX domain to be recovered, says the driver",
        "`systemctl restart nvidia-imex` on the hosts of its NVLink domain",
    ),
}


def recovery_remarks(state: GpuState) -> Iterator[Remark]:
    """Yields what the driver asks to be done with a GPU now."""
    if state.recovery_action in _ACTIONS:
        level, text, fix = _ACTIONS[state.recovery_action]
        yield level, text, fix, "state.recovery_action"


def xid_remarks(events: Sequence[XidEvent], state: GpuState | None) -> Iterator[Remark]:
    """Yields what a GPU's errors mean now.

    Args:
        events: errors of one GPU, the last of each kind, in the order in which each kind first came.
        state: condition of the GPU as the driver tells it now; None where it does not answer.
    """
    action = None if state is None else state.recovery_action
    for event in events:
        if event.number == _ACTION_XID:
            # The driver's answer of now is the better one.
            if action is None and not event.over and event.action in _ACTIONS:
                level, text, fix = _ACTIONS[event.action]
                yield level, f"{text}{_ago(event)}", fix, "xid_events"
        elif event.number in _XIDS:
            level, meaning = _XIDS[event.number]
            if event.number in _WITH_FATALITY and event.fatal is not None:
                level = "red" if event.fatal else "note"
            text = f"Xid {event.number}: {meaning}{_ago(event)}"
            if event.over:
                yield "note", f"{text}; the driver has recovered since", _NOTHING, "xid_events"
            elif action == "none":
                lower: Level = "amber" if level == "red" else "note"
                yield lower, f"{text}; the driver asks for nothing now", _NOTHING, "xid_events"
            else:
                yield level, text, _RESET, "xid_events"


def switch_verdicts(events: Sequence[SwitchEvent], *, gpus_are_well: bool) -> Iterator[ProbeVerdict]:
    """Yields what the errors of NVSwitches mean: a fatal one ends the work of every GPU on the board.

    Args:
        events: errors of all NVSwitches.
        gpus_are_well: whether the driver asks for nothing on any GPU, and all GPUs have their links: the switches were
            reset since, which leaves no line in the log.
    """
    for number, event in enumerate(events):
        text = f"{event.name} ({event.address}) SXid {event.number}{_ago(event)}"
        text += f": {event.text}" if event.text else ""
        path = f"topology.switch_events.{number}"
        if event.over:
            text += "; the driver has recovered since"
            yield ProbeVerdict(level="note", text=text, fix=_NOTHING, path=path)
        elif event.fatal and gpus_are_well:
            text += "; the driver asks for nothing now"
            yield ProbeVerdict(level="amber", text=text, fix=_NOTHING, path=path)
        elif event.fatal:
            fix = (
                "end all jobs here; reset all GPUs and switches (`nvidia-smi -r`) or reboot; serviced if it comes back"
            )
            yield ProbeVerdict(level="red", text=f"{text}: NVLink of all GPUs here may be gone", fix=fix, path=path)
        else:
            fix = "nothing, unless they grow: `nvidia-smi nvlink -e`"
            yield ProbeVerdict(level="note", text=f"{text} (not fatal)", fix=fix, path=path)


def _ago(event: XidEvent | SwitchEvent) -> str:
    """Returns ` (3 h ago)`, by the largest unit that fits: GPUs that failed together are to share a line."""
    if event.age_s is None:
        return ""
    for seconds, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if event.age_s >= seconds:
            return f" ({int(event.age_s / seconds)} {unit} ago)"
    return " (just now)"
