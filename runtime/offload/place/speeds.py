"""Speeds for the placement, measured over what will be used: the bus, host memory, and drives that states lie on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import IoSettings

from ...memory.bus import Bus
from ...memory.host_pool import HostPool
from ...memory.measure import measure_bus, measure_step
from ..disk.records import bytes_of
from .tiers import Buses

#: Bytes that are written to the drives and read back, in two extents.
_DISK_BYTES = 32 << 20


def measure_buses(
    bus: Bus, pool: HostPool, device: torch.device, *, drives: Sequence[str] = (), io: IoSettings | None = None
) -> Buses:
    """Returns what copies, a step on the host, and direct reads and writes reach now; well under a second.

    Moves 64 MiB over the bus each way, and with drives 32 MiB to them and back, in a file without a name.

    Args:
        bus: bus between device and host.
        pool: pool that makes the host memory.
        device: device that computes.
        drives: folders of `nvme_path`; none where nothing goes to a drive.
        io: settings of reads and writes on the drives; None where drives are not measured.

    Raises:
        OffloadError: a folder has no room, or cannot be read or written.
    """
    copies = measure_bus(bus, pool, device)
    read = write = None
    if drives and io is not None:
        read, write = _measure_drives(drives, io)
    return Buses(out=copies.out, back=copies.back, host=measure_step(), disk_read=read, disk_write=write)


def _measure_drives(drives: Sequence[str], io: IoSettings) -> tuple[float, float]:
    """Returns bytes a second of reading and writing, two extents at once."""
    file = ExtentFile(drives, io, what="measured speeds")
    half = _DISK_BYTES // 2
    extents = [file.reserve(name, half) for name in ("first", "second")]
    memory = HostPool(None, say=_nothing).zeros(_DISK_BYTES, dtype=torch.uint8).fill_(1)
    parts = [bytes_of(part) for part in memory.split(half)]
    try:
        file.allocate()
        seconds: list[float] = []
        for move in (file.write, file.read):
            started = time.perf_counter()
            pending = [move(extent, part) for extent, part in zip(extents, parts, strict=True)]
            for one in pending:
                one.wait()
            seconds.append(max(time.perf_counter() - started, 1e-9))
    finally:
        file.close()
    return _DISK_BYTES / seconds[1], _DISK_BYTES / seconds[0]


def _nothing(text: str) -> None:
    """Memory that is not page-locked has nothing to say."""
