"""Slices of parameters in host memory, streamed to the device unit by unit (`offload_param.device` "cpu").

Knows slices and the bus. In which order units are needed, and how far ahead they are fetched, their store decides; what
a unit is, is known to neither.

[Note: streaming]
A slice crosses the bus straight into its own place in the buffer that is gathered, so that the all-gather, in place,
finds it there: nothing is staged, and with one rank the copy is all there is. Slots are the buffers: with k slots,
k - 1 units are on their way while one computes, in forward and backward alike, and `stage3_prefetch_bucket_size` says
how many that is. The bus carries the compute dtype alone.
No host waits for a copy: on an accelerator the all-gather is enqueued behind it, on a stream beside the computation. A
CPU has no streams, so there the all-gather begins when the unit is wanted, and only the copy overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsrun.choices.gather_plan import LEAVING_COUNT, leaving_numel

from ...memory.arena import Arena, room_for
from ...memory.arenas import Arenas
from ...memory.bus import Bus, Event
from ...memory.host_pool import HostPool
from ...memory.pages import fresh_zeros
from ...mesh.collectives import Collectives, Pending, own_slice


@dataclass(slots=True)
class _Leaving:
    """A buffer on the device through which new values leave it, and the copy that read it last."""

    memory: Tensor
    event: Event | None = None


class HostShards:
    """A `zero.tier.ShardTier` of host memory, see [Note: streaming].

    Args:
        bus: bus between the device and the host.
        memory: arenas for the slices, and for the device buffers through which new values leave.
        pool: pool that makes the host memory.
        device: device on which parameters are used.
    """

    def __init__(
        self,
        bus: Bus,
        memory: Arenas,
        *,
        pool: HostPool,
        device: torch.device,
    ) -> None:
        self.bus = bus
        self._memory = memory
        self._pool = pool
        self._device = device
        self._arena: Arena | None = None
        self._shards: dict[int, Tensor] = {}
        self._read_by: dict[int, Event] = {}  # the last copy of a slice to the device
        self._written_by: dict[int, Event] = {}  # a copy of new values to the host, until it has been waited for
        self._leaving: list[_Leaving] = []

    def reserve(self, name: str, numels: Sequence[int], dtype: torch.dtype, *, labels: Sequence[str]) -> None:
        """See `zero.tier.ShardTier`."""
        self._arena = self._memory.reserve(
            name, room_for(numels), lambda numel: self._pool.zeros(numel, dtype=dtype), tier="host"
        )

    def reserve_leaving(self, numel: int, dtype: torch.dtype) -> None:
        """Makes room on the device for values that `write` rounds; for slices of at most `numel` elements."""
        piece = leaving_numel(numel)
        arena = self._memory.reserve(
            "parameters leaving",
            room_for([piece] * LEAVING_COUNT),
            lambda total: fresh_zeros(total, dtype=dtype, device=self._device),
        )
        self._leaving = [_Leaving(arena.take(piece)) for _ in range(LEAVING_COUNT)]

    def admit(self, index: int, values_S: Tensor) -> Tensor:
        """See `zero.tier.ShardTier`."""
        assert self._arena is not None, "room is reserved before slices come"
        shard = self._shards[index] = self._arena.take(values_S.numel())
        return shard.copy_(values_S)

    def gather(self, index: int, flat_N: Tensor, replicas: Collectives, *, label: str) -> Pending:
        """See `zero.tier.ShardTier`."""
        mine = own_slice(flat_N, rank=replicas.rank, size=replicas.size)
        written = self._written_by.pop(index, None)
        after = () if written is None else (written,)
        event = self.bus.start_back(self._shards[index], mine, kind="parameters", after=after)
        self._read_by[index] = event
        beside = self.bus.behind(event)
        if beside is None:
            return _Arriving(self.bus, event, lambda: replicas.all_gather(flat_N, mine, label=label))
        with beside:
            gathering = replicas.all_gather(flat_N, mine, label=label)
        return _Arriving(self.bus, event, lambda: gathering)

    def write(self, index: int, values_S: Tensor) -> None:
        """See `zero.tier.ShardTier`.

        Values on the device are rounded there, and cross the bus in the slice's dtype. Where nothing was reserved for
        that, they are in host memory, and do not cross it.
        """
        shard = self._shards[index]
        read = self._read_by.pop(index, None)
        if not self._leaving:
            if read is not None:
                read.synchronize()
            shard.copy_(values_S)
            return
        after = () if read is None else (read,)
        piece = self._leaving[0].memory.numel()
        for target, values in zip(shard.split(piece), values_S.split(piece), strict=True):
            leaving = self._leaving.pop(0)
            self._leaving.append(leaving)
            if leaving.event is not None:
                self.bus.wait(leaving.event)
            rounded = leaving.memory.narrow(0, 0, values.numel()).copy_(values)
            leaving.event = self.bus.start_out(rounded, target, kind="parameters", after=after)
            self._written_by[index] = leaving.event

    def settle(self) -> None:
        """See `zero.tier.ShardTier`."""
        self.bus.finish()
        self._read_by.clear()
        self._written_by.clear()


class _Arriving:
    """A buffer on its way: the copy of this rank's slice, and the all-gather that begins behind it.

    Args:
        bus: bus that carries the slice.
        event: event at the end of the slice's copy.
        gathering: function that returns the all-gather, and begins it if it has not begun yet.
    """

    def __init__(self, bus: Bus, event: Event, gathering: Callable[[], Pending]) -> None:
        self._bus = bus
        self._event = event
        self._gathering: Callable[[], Pending] | None = gathering

    def wait(self) -> None:
        """See `Pending`."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            self._bus.wait(self._event)
            gathering().wait()
