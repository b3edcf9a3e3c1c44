"""What the driver says of this host's GPUs just after a rank died of one. Changes nothing.

Runs as a process of its own, started by `gpu_inquiry`: a GPU that is lost may keep whoever asks for it in the kernel
for minutes. Tells only what the job's own lines do not: which card it was, and what is wrong with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from dsrun.units import format_bytes

from ... import processes
from ...machine.devices.choice import user_of_process
from ...machine.gpus.nvml import NoDriver, ask, ask_driver, error_name, open_nvml, text_of
from ...machine.gpus.state import read_state
from ...machine.gpus.xids import XidEvent, read_driver_errors
from ...machine.pci import pci_address
from ...protocol import GpuFinding, GpuFindings, encode

#: An error of the driver that is older has not ended the rank.
_RECENT_S = 600.0


def main() -> None:
    """Writes the findings as one message; argv has the agent's pid, the rank, and the GPUs of the ranks as JSON."""
    agent_pid, rank, gpus = int(sys.argv[1]), int(sys.argv[2]), [GpuFinding(**gpu) for gpu in json.loads(sys.argv[3])]
    processes.die_with_parent(agent_pid, signal.SIGKILL)

    def is_of_job(pid: int) -> bool:
        with suppress(psutil.Error):
            return any(parent.pid == agent_pid for parent in psutil.Process(pid).parents())
        # Gone by now, or another container's: nobody could do anything with its number.
        return True

    found = find_faults(Path("/"), gpus, is_of_job=is_of_job)
    os.write(1, encode(GpuFindings(rank=rank, gpus=found)))


def find_faults(
    root: Path,
    gpus: Sequence[GpuFinding],
    *,
    is_of_job: Callable[[int], bool],
    user_of: Callable[[int], str | None] = user_of_process,
    load_nvml: Callable[[], Any] | None = None,
) -> list[GpuFinding]:
    """Asks the driver for each GPU that it shows, and holds them to those that ranks were given.

    Args:
        root: `/`, or a made-up tree with dev/kmsg.
        gpus: GPUs of the ranks, with neither number nor faults.
        is_of_job: whether a process need not be told: it is the job's own.
        user_of: function that returns the user of a process; None if the user is not known.
        load_nvml: function that returns the `pynvml` module; tests give a made-up one.

    Returns:
        all GPUs that ranks were given, and others with a fault.
    """
    log = read_driver_errors(root)
    events = {} if isinstance(log, str) else log.events
    try:
        with open_nvml(load_nvml) as nvml:
            seen = [
                _finding(nvml, index, gpus, is_of_job, user_of)
                for index in range(ask_driver(nvml, nvml.nvmlDeviceGetCount) or 0)
            ]
    except NoDriver as fault:
        seen, missing = [], f"the driver does not answer: {fault}"
    else:
        lost = next((finding.faults[0] for finding in seen if finding.address is None and finding.faults), None)
        missing = lost or "the driver does not show it any more"
    shown = [finding for finding in seen if finding.address is not None]
    addresses = {finding.address for finding in shown}
    shown += [replace(gpu, faults=[missing]) for gpu in gpus if gpu.address not in addresses]
    found = [replace(gpu, faults=[*gpu.faults, *_xids(events.get(gpu.address or "", ()))]) for gpu in shown]
    return [gpu for gpu in found if gpu.ranks or gpu.faults]


def _finding(
    nvml: Any,
    index: int,
    gpus: Sequence[GpuFinding],
    is_of_job: Callable[[int], bool],
    user_of: Callable[[int], str | None],
) -> GpuFinding:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        # Its address, by which it is known, is not told either; one that may not be asked for is another's.
        lost = error_name(error) != "NoPermission"
        return GpuFinding(index=index, faults=[f"the driver does not reach it: {error}"] if lost else [])
    info = ask(nvml, "nvmlDeviceGetPciInfo", handle)
    address = None if info is None else pci_address(text_of(info.busId) or "")
    ranks = next((gpu.ranks for gpu in gpus if gpu.address is not None and gpu.address == address), [])
    state = read_state(nvml, handle, user_of=user_of)
    faults: list[str] = []
    if state.remap_failed:
        faults.append("a broken row of its memory could not be replaced: the card is to be exchanged")
    elif state.remap_pending:
        faults.append("a broken row of its memory waits for a reset to be replaced")
    if state.recovery_action not in (None, "none"):
        faults.append(f"the driver asks to {state.recovery_action}")
    # What others do on a GPU of their own is no fault.
    for process in state.processes or () if ranks else ():
        # Nor is a desktop in the way of a job, but a rank that ran out of memory lacks what it has.
        if process.holds_memory and not is_of_job(process.pid):
            size = "memory" if process.memory_bytes is None else format_bytes(process.memory_bytes)
            faults.append(f"{process.label} holds {size} of it")
    return GpuFinding(
        index=index,
        uuid=text_of(ask(nvml, "nvmlDeviceGetUUID", handle)),
        address=address,
        ranks=ranks,
        faults=faults,
    )


def _xids(events: Sequence[XidEvent]) -> Iterator[str]:
    for event in events:
        if not event.over and event.age_s is not None and event.age_s <= _RECENT_S:
            yield f"Xid {event.number}" + (f" ({event.text})" if event.text else "")
