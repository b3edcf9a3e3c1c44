"""Errors of GPUs that the driver wrote to the kernel's log (Xids). Reads what is there now and never waits for more."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .probe_pci import pci_address

#: Of the log's end; a ring buffer is rarely larger, and a probe is not to read for seconds.
_MOST_BYTES = 4 << 20

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): ([0-9]+)")


def read_xids(root: Path) -> dict[str, tuple[int, ...]] | str:
    """Reads the Xids since boot, oldest first, by the PCI address of the GPU.

    Args:
        root: `/`, or a made-up tree with dev/kmsg.

    Returns:
        the errors, or the reason why they cannot be told.
    """
    try:
        handle = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"/dev/kmsg: {(error.strerror or str(error)).lower()}"
    try:
        return parse_xids(_all_there_is(handle))
    except OSError as error:
        return f"/dev/kmsg: {(error.strerror or str(error)).lower()}"
    finally:
        os.close(handle)


def parse_xids(log: str) -> dict[str, tuple[int, ...]]:
    """Finds the Xids in a kernel log."""
    found: dict[str, tuple[int, ...]] = {}
    for match in _XID.finditer(log):
        # The driver leaves the function out: `PCI:0000:1b:00`.
        text = match.group(1) if "." in match.group(1) else f"{match.group(1)}.0"
        address = pci_address(text)
        if address is not None:
            found[address] = (*found.get(address, ()), int(match.group(2)))
    return found


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
