"""Errors of GPUs (Xids) and of NVSwitches (SXids) that the driver wrote to the kernel's log.

Reads what is there now and never waits for more; what an error means is told in `verdicts/xids.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..pci import pci_address
from ..proc_files import read_text

#: Of the log's end; a ring buffer is rarely larger, and a probe is not to read for seconds.
_MOST_BYTES = 4 << 20
_MOST_TEXT = 200
#: The log's clock and that of the uptime drift apart by less.
_CLOCKS_APART_S = 60.0

#: With MIG the instance stands behind the address: `(PCI:0000:01:00 GPU-I:05)`, `(... GPU-I:01 GPU-CI:02)`.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)[^)]*\): ([0-9]+)(?:, *(.*))?")
#: Lines of details (`Severity 0 Engine instance 32 ...`) follow each of them and have neither word.
_SXID = re.compile(r"nvidia-(nvswitch[0-9]+): SXid \(PCI:([0-9A-Fa-f:.]+)\): ([0-9]+), (Non-fatal|Fatal)(?:, *(.*))?")
_LOADING = re.compile(r"NVRM: loading NVIDIA UNIX")
#: A record of /dev/kmsg: priority, number, microseconds since boot, flags; then the text.
_RECORD = re.compile(r"[0-9]+,[0-9]+,([0-9]+),[^;]*;(.*)")
_FATALITY = re.compile(r"\b(non-?fatal|fatal)\b", re.IGNORECASE)
_ACTION = re.compile(r"recovery action changed from .* to 0x[0-9a-fA-F]+ \(([^)]*)\)")
_ACTION_XID = 154


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """An error of a GPU.

    Attributes:
        number: the Xid.
        text: text that the driver wrote after the Xid's number.
        fatal: whether the driver's text calls the error fatal; None for Xids that come without such a word.
        action: action that the driver has asked for since, by its Xid 154 (`Node Reboot Required`); None for other
            Xids.
        age_s: seconds since the error; None where the log has no times.
        over: the driver was loaded anew since, or took back what it had asked for.
    """

    number: int
    text: str
    fatal: bool | None
    action: str | None
    age_s: float | None
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchEvent:
    """An error of an NVSwitch; attributes as for `XidEvent`, `name` is the switch's (`nvswitch3`)."""

    name: str
    address: str | None
    number: int
    text: str
    fatal: bool
    age_s: float | None
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverErrors:
    """What a kernel log has of the driver's errors.

    Attributes:
        xids: PCI address of a GPU -> numbers of its errors since boot, oldest first.
        events: PCI address of a GPU -> the last of each kind of its errors, in the order of the first.
        switches: the last of each kind of each NVSwitch's errors.
    """

    xids: Mapping[str, tuple[int, ...]]
    events: Mapping[str, tuple[XidEvent, ...]]
    switches: tuple[SwitchEvent, ...]


def read_driver_errors(root: Path) -> DriverErrors | str:
    """Reads the errors since boot, or since the log's beginning.

    Args:
        root: `/`, or a made-up tree with dev/kmsg and proc/uptime.

    Returns:
        the errors, or the reason why they cannot be told.
    """
    try:
        handle = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"/dev/kmsg: {(error.strerror or str(error)).lower()}"
    uptime = (read_text(root / "proc/uptime") or "").split()
    try:
        return parse_driver_errors(_all_there_is(handle), uptime_s=float(uptime[0]) if uptime else None)
    except OSError as error:
        return f"/dev/kmsg: {(error.strerror or str(error)).lower()}"
    finally:
        os.close(handle)


def parse_driver_errors(log: str, *, uptime_s: float | None) -> DriverErrors:
    """Finds the errors in a kernel log.

    Args:
        log: records of /dev/kmsg, in their order.
        uptime_s: seconds since boot; None where ages are not to be told.
    """
    xids: dict[str, tuple[int, ...]] = {}
    events: dict[str, dict[tuple[int, bool | None], XidEvent]] = {}
    switches: dict[tuple[str, int], SwitchEvent] = {}
    for line in log.splitlines():
        if _LOADING.search(line):
            events = {address: _all_over(found) for address, found in events.items()}
            switches = {key: replace(event, over=True) for key, event in switches.items()}
        elif match := _XID.search(line):
            # The driver leaves the function out: `PCI:0000:1b:00`.
            text = match.group(1) if "." in match.group(1) else f"{match.group(1)}.0"
            address = pci_address(text)
            if address is None:
                continue
            event = _xid(int(match.group(2)), match.group(3) or "", _age_s(line, uptime_s))
            xids[address] = (*xids.get(address, ()), event.number)
            found = events.setdefault(address, {})
            if event.action == "None":
                events[address] = _all_over(found)
            else:
                found[event.number, event.fatal] = event
        elif match := _SXID.search(line):
            name, number = match.group(1), int(match.group(3))
            switches[name, number] = SwitchEvent(
                name=name,
                address=pci_address(match.group(2)),
                number=number,
                text=(match.group(5) or "")[:_MOST_TEXT],
                fatal=match.group(4) == "Fatal",
                age_s=_age_s(line, uptime_s),
            )
    return DriverErrors(
        xids=xids,
        events={address: tuple(found.values()) for address, found in events.items()},
        switches=tuple(switches.values()),
    )


def _xid(number: int, text: str, age_s: float | None) -> XidEvent:
    fatality = _FATALITY.search(text)
    action = _ACTION.search(text) if number == _ACTION_XID else None
    return XidEvent(
        number=number,
        text=text[:_MOST_TEXT],
        fatal=None if fatality is None else fatality.group(1).lower() == "fatal",
        action=None if action is None else action.group(1),
        age_s=age_s,
    )


def _all_over(events: Mapping[tuple[int, bool | None], XidEvent]) -> dict[tuple[int, bool | None], XidEvent]:
    return {key: replace(event, over=True) for key, event in events.items()}


def _age_s(line: str, uptime_s: float | None) -> float | None:
    record = _RECORD.match(line)
    if record is None or uptime_s is None:
        return None
    age_s = uptime_s - int(record.group(1)) / 1e6
    # Containers of LXC have an uptime of their own, beside the host's log: an error is not yet to come.
    return None if age_s < -_CLOCKS_APART_S else max(0.0, age_s)


def _all_there_is(handle: int) -> str:
    parts: list[bytes] = []
    size = 0
    while size < _MOST_BYTES:
        try:
            # The device gives one record a call.
            part = os.read(handle, 16384)
        except BlockingIOError:
            break
        except BrokenPipeError:
            # Overwritten while it was read; the next call goes on with what is left.
            continue
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts).decode(errors="replace")
