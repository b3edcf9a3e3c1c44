"""Slices of parameters on a disk, streamed to the device unit by unit (`offload_param.device` "nvme").

As many as may be stay in host memory (`max_in_cpu`); the others are read into buffers of the host, ahead of their use,
and cross the bus from there. A slice's first values and new ones are written past the page cache too. Whoever reads or
sets a slice where it lies, between steps, does so through a mapping of the file, which the kernel keeps coherent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsrun.direct_io.counts import IoCounts
from dsrun.direct_io.extent_file import Extent, ExtentFile
from dsrun.direct_io.pending import PendingIo as Read

from ...memory.arena import room_for
from ...memory.arenas import Arenas
from ...memory.bus import Bus, Event
from ...memory.host_pool import HostPool
from ...mesh.collectives import Collectives, Pending, own_slice
from ..disk.file_addresses import FileAddresses
from ..disk.moving_pages import AddressSpace
from ..disk.records import bytes_of
from .on_host import HostShards


class DiskShards:
    """A `zero.tier.ShardTier` of a disk, and of host memory for what may stay there.

    Args:
        host: store of the slices that stay in host memory.
        open_file: function that makes a file.
        most_in_memory: elements that may stay.
        buffers: number of host buffers for slices on their way.
        bus: bus between the device and the host.
        memory: arenas in which buffers are reserved.
        pool: pool that makes the host memory.
    """

    def __init__(
        self,
        host: HostShards,
        open_file: Callable[[], ExtentFile],
        *,
        most_in_memory: int,
        buffers: int,
        bus: Bus,
        memory: Arenas,
        pool: HostPool,
    ) -> None:
        self.host = host
        self.bus = bus
        self._open_file = open_file
        self._left = most_in_memory
        self._staying_bytes = 0
        self._buffers = buffers
        self._memory = memory
        self._pool = pool
        self._stays: deque[bool] = deque()
        self._coming: deque[_Slices] = deque()
        self._slices: list[_Slices] = []
        self._of: dict[int, _Slices] = {}

    def reserve(self, name: str, numels: Sequence[int], dtype: torch.dtype, *, labels: Sequence[str]) -> None:
        """See `zero.tier.ShardTier`: the first slices stay in memory, for they are wanted first and last.

        Raises:
            OffloadError: there is not so much room on the disk.
        """
        staying: list[int] = []
        for numel in numels:
            stays = numel <= self._left and len(staying) == len(self._stays)
            self._left -= numel if stays else 0
            self._stays.append(stays)
            staying += [numel] if stays else []
        if staying:
            self.host.reserve(name, staying, dtype, labels=labels[: len(staying)])
            self._staying_bytes += sum(staying) * dtype.itemsize
        leaving = numels[len(staying) :]
        if leaving:
            ring = self._memory.reserve(
                f"{name} on their way",
                room_for([max(leaving)] * min(self._buffers, len(leaving))),
                lambda numel: self._pool.zeros(numel, dtype=dtype),
                tier="host",
            )
            buffers = [ring.take(max(leaving)) for _ in range(min(self._buffers, len(leaving)))]
            names = [f"{name} of {label}" for label in labels[len(staying) :]]
            slices = _Slices(self, self._open_file(), names, leaving, buffers)
            self._memory.reserve(f"{name} on a drive", slices.nbytes, slices.everything, tier="disk").take(
                slices.nbytes
            )
            self._slices.append(slices)
            self._coming.append(slices)

    def admit(self, index: int, values_S: Tensor) -> Tensor:
        """See `zero.tier.ShardTier`."""
        if self._stays.popleft():
            return self.host.admit(index, values_S)
        slices = self._of[index] = self._coming[0]
        shard = slices.admit(index, values_S)
        if not self._stays or not slices.has_room:
            self._coming.popleft()
        return shard

    def gather(self, index: int, flat_N: Tensor, replicas: Collectives, *, label: str) -> Pending:
        """See `zero.tier.ShardTier`."""
        slices = self._of.get(index)
        return (
            self.host.gather(index, flat_N, replicas, label=label)
            if slices is None
            else slices.gather(index, flat_N, replicas, label=label)
        )

    def write(self, index: int, values_S: Tensor) -> None:
        """See `zero.tier.ShardTier`."""
        slices = self._of.get(index)
        if slices is None:
            self.host.write(index, values_S)
        else:
            slices.write(index, values_S)

    def sink_of(self, index: int) -> Callable[[Tensor], None] | None:
        """Returns what takes a slice's new values from host memory; None where they are written where they lie."""
        slices = self._of.get(index)
        return None if slices is None else lambda values_S: slices.take(index, values_S)

    def settle(self) -> None:
        """See `zero.tier.ShardTier`."""
        self.host.settle()
        for slices in self._slices:
            slices.settle()

    @property
    def has_files(self) -> bool:
        """Whether any slice is on the disk."""
        return bool(self._slices)

    def host_bytes(self) -> int:
        """Returns the bytes of host memory that slices lie in, or pass through."""
        return self._staying_bytes + sum(buffer.nbytes for buffer in self.buffers())

    def buffers(self) -> list[Tensor]:
        """Returns the host memory that slices pass through."""
        return [buffer for slices in self._slices for buffer in slices.buffers]

    def addresses(self) -> list[FileAddresses]:
        """Returns where in files slices lie, for checkpoints: those of frozen parameters are there and nowhere else."""
        return [slices.addresses for slices in self._slices]

    @property
    def file_bytes(self) -> int:
        """Bytes of the files."""
        return sum(slices.file.reserved_bytes for slices in self._slices)

    def counts(self) -> list[IoCounts]:
        """Returns what each file has moved past the page cache."""
        return [slices.file.counts() for slices in self._slices]


class _Slices:
    """Slices of one kind in one file.

    Args:
        tier: theirs.
        file: file that gets an extent for each slice.
        names: names of the slices in error messages.
        numels: elements of each slice, in the order in which they are admitted.
        buffers: host buffers for slices on their way, each as long as the longest slice.
    """

    def __init__(
        self, tier: DiskShards, file: ExtentFile, names: Sequence[str], numels: Sequence[int], buffers: Sequence[Tensor]
    ) -> None:
        self.file = file
        self._tier = tier
        self._dtype = buffers[0].dtype
        itemsize = self._dtype.itemsize
        extents = [file.reserve(name, numel * itemsize) for name, numel in zip(names, numels, strict=True)]
        file.allocate()
        self._space = AddressSpace(file.reserved_bytes)
        for fd, piece in file.layout():
            self._space.show_file(piece.start, piece.nbytes, fd, piece.at)
        self.addresses = FileAddresses(self._space.address, file)
        self._coming = deque(extents)
        self._extents: dict[int, Extent] = {}
        self.buffers = buffers
        self._free = list(buffers)
        self._busy: deque[tuple[Tensor, Event]] = deque()
        self._late: deque[_FromDisk] = deque()
        self._was_open = False

    @property
    def has_room(self) -> bool:
        """Whether slices are still to be admitted."""
        return bool(self._coming)

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.file.reserved_bytes

    def everything(self, nbytes: int) -> Tensor:
        """Returns the first bytes of all slices, where they are mapped."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._space.view(0, nbytes), dtype=torch.uint8)

    def admit(self, index: int, values_S: Tensor) -> Tensor:
        extent = self._extents[index] = self._coming.popleft()
        self.write(index, values_S, counted=False)
        return torch.frombuffer(self._space.view(extent.offset, extent.nbytes), dtype=self._dtype)

    def take(self, index: int, values_S: Tensor) -> None:
        """Writes new values of host memory, in the slice's dtype."""
        self.file.write(self._extents[index], bytes_of(values_S)).wait()

    def write(self, index: int, values_S: Tensor, *, counted: bool = True) -> None:
        buffer = self.free_buffer()
        landing = buffer.narrow(0, 0, values_S.numel())
        if counted and values_S.device.type != "cpu":
            rounded = values_S.to(self._dtype)
            self._tier.bus.start_out(rounded, landing, kind="parameters").synchronize()
        else:
            landing.copy_(values_S)
        self.take(index, landing)
        self._free.append(buffer)

    def gather(self, index: int, flat_N: Tensor, replicas: Collectives, *, label: str) -> Pending:
        mine = own_slice(flat_N, rank=replicas.rank, size=replicas.size)
        coming = _FromDisk(self, index, mine, lambda: replicas.all_gather(flat_N, mine, label=label))
        # One after the other, so that the first to be waited for has a buffer.
        if self._late or not (self._free or (self._busy and self._busy[0][1].query())):
            self._late.append(coming)
        else:
            coming.start()
        return coming

    def read(self, index: int, into_S: Tensor) -> Read:
        """Starts to read a slice, with what was set through the mapping."""
        extent = self._extents[index]
        if self._was_open and self.file.verifies and self._space.was_touched(extent.offset, extent.nbytes):
            self.file.note_written(extent, self._space.view(extent.offset, extent.nbytes))
        return self.file.read(extent, bytes_of(into_S))

    def arrive(self, buffer: Tensor, mine: Tensor) -> None:
        """Sends what a buffer holds over the bus."""
        event = self._tier.bus.start_back(buffer.narrow(0, 0, mine.numel()), mine, kind="parameters")
        self._busy.append((buffer, event))
        self._tier.bus.wait(event)

    def start_late(self, coming: _FromDisk) -> None:
        """Starts one that had to wait for a buffer, and those before it."""
        while coming in self._late:
            self._late.popleft().start()

    def free_buffer(self) -> Tensor:
        """Returns a buffer that nothing needs, once the bus has carried what is in it."""
        if not self._free:
            assert self._busy, "all buffers are on their way, and nobody waits for them"
            buffer, event = self._busy.popleft()
            event.synchronize()
            self._free.append(buffer)
        return self._free.pop()

    def settle(self) -> None:
        while self._busy:
            buffer, event = self._busy.popleft()
            event.synchronize()
            self._free.append(buffer)
        self._was_open = True


class _FromDisk:
    """A slice on its way: from the disk to the host, from there to the device, and then to the other ranks."""

    def __init__(self, slices: _Slices, index: int, mine: Tensor, gathering: Callable[[], Pending]) -> None:
        self._slices = slices
        self._index = index
        self._mine = mine
        self._gathering = gathering
        self._buffer: Tensor | None = None
        self._read: Read | None = None
        self._is_done = False

    def start(self) -> None:
        """Starts to read."""
        self._buffer = self._slices.free_buffer()
        self._read = self._slices.read(self._index, self._buffer.narrow(0, 0, self._mine.numel()))

    def wait(self) -> None:
        """See `Pending`."""
        if self._is_done:
            return
        self._is_done = True
        if self._read is None:
            self._slices.start_late(self)
        assert self._read is not None, "it was started"
        assert self._buffer is not None, "it was started"
        self._read.wait()
        self._slices.arrive(self._buffer, self._mine)
        self._gathering().wait()
