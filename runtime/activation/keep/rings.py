"""Which ring keeps what leaves the device: one in host memory, or one that goes on to a disk."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch

from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.direct_io.calls import DiskCalls
from dsrun.direct_io.counts import IoCounts, added_up
from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import IoSettings

from ...memory.bus import Bus, instant_bus_for
from ...memory.host_pool import host_pool_for
from .disk_ring import DiskRing
from .host_ring import HostRing
from .keeper import Keeper

_log = logging.getLogger(__name__)


class Rings:
    """Makes rings as the section says, and counts what those with a file have moved.

    Args:
        section: checked `activation_checkpointing` section of the config.
        io: settings of file reads and writes; None for the defaults.
        rank: rank of this process, for error messages.
        calls: operating-system calls for files; tests pass some that fail. None for the real ones.
        bus_of: function that makes the bus of a ring by its device; tests pass one with late copies.

    Raises:
        OffloadError: no file can be made in one of the paths.
    """

    def __init__(
        self,
        section: ActivationCheckpointing,
        *,
        io: IoSettings | None,
        rank: int,
        calls: DiskCalls | None = None,
        bus_of: Callable[[torch.device], Bus] = instant_bus_for,
    ) -> None:
        self._bus_of = bus_of
        self._paths = section.nvme_path
        self._buffers = section.nvme_buffer_count
        self._io = io or IoSettings()
        self._what = f"activations of rank {rank}"
        self._calls = calls
        self._on_disk: list[weakref.ref[DiskRing]] = []
        if self._paths:
            self._open().close()  # before anything is computed

    def ring_of(self, device: torch.device) -> Keeper:
        """Returns a new ring of a device."""
        bus = self._bus_of(device)
        pool = host_pool_for(device, pin=True, say=_log.warning)
        if not self._paths:
            return HostRing(device, bus, pool=pool)
        ring = DiskRing(
            device,
            bus,
            open_file=self._open,
            buffers=self._buffers,
            memory=lambda nbytes: pool.zeros(nbytes, dtype=torch.uint8),
        )
        self._on_disk.append(weakref.ref(ring))
        return ring

    def counts(self) -> IoCounts:
        """Returns what was moved to and from disks so far."""
        rings = [ring() for ring in self._on_disk]
        return added_up([ring.counts() for ring in rings if ring is not None])

    def _open(self) -> ExtentFile:
        return ExtentFile(self._paths, self._io, what=self._what, calls=self._calls)
