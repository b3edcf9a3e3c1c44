"""Copies between a device and host memory: asynchronous on an accelerator with a stream of their own, else at once.

Only starts copies and says what waits for them; whose they are, `host_ring.py` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class CopyCounts:
    """What was copied since the beginning."""

    out: int = 0
    out_bytes: int = 0
    back: int = 0
    back_bytes: int = 0


class Copier(Protocol):
    """Starts copies; an event is what to wait for, None where nothing is left to wait for."""

    counts: CopyCounts

    def start_out(self, source_N: Tensor, slot_N: Tensor) -> Any:
        """Copies to host memory; `source_N` must live, and stay what it is, until its event has been waited for."""
        ...

    def start_back(self, slot_N: Tensor) -> tuple[Tensor, Any]:
        """Copies to the device; returns the new tensor, to be read once its event has been waited for."""
        ...

    def wait(self, event: Any) -> None:
        """What the device is given from now on runs after the copy; the host does not stop."""
        ...

    def finish(self) -> None:
        """Waits on the host for all copies."""
        ...


class HostCopier:
    """Where the device is the CPU: the same schedule over a second pool of memory, each copy done when it returns."""

    def __init__(self) -> None:
        self.counts = CopyCounts()

    def start_out(self, source_N: Tensor, slot_N: Tensor) -> None:
        """See `Copier`."""
        slot_N.copy_(source_N)
        _count_out(self.counts, slot_N)

    def start_back(self, slot_N: Tensor) -> tuple[Tensor, None]:
        """See `Copier`."""
        _count_back(self.counts, slot_N)
        return slot_N.clone(), None

    def wait(self, event: Any) -> None:
        """See `Copier`."""

    def finish(self) -> None:
        """See `Copier`."""


class StreamCopier:
    """Copies on a stream of an accelerator.

    Memory is allocated and freed on the compute stream alone: a tensor that a copy reads is let go after the compute
    stream waits for the copy, and one that a copy writes is allocated before the copy stream waits for the compute
    stream. So the allocator's own order holds, without `record_stream`, whose frees come too late to plan with.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = CopyCounts()
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device=device)

    def start_out(self, source_N: Tensor, slot_N: Tensor) -> Any:
        """See `Copier`."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            slot_N.copy_(source_N, non_blocking=True)
        _count_out(self.counts, slot_N)
        return self._stream.record_event()

    def start_back(self, slot_N: Tensor) -> tuple[Tensor, Any]:
        """See `Copier`."""
        arriving = torch.empty_like(slot_N, device=self._device)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            arriving.copy_(slot_N, non_blocking=True)
        _count_back(self.counts, slot_N)
        return arriving, self._stream.record_event()

    def wait(self, event: Any) -> None:
        """See `Copier`."""
        self._module.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """See `Copier`."""
        self._stream.synchronize()


def copier_for(device: torch.device) -> Copier:
    """Returns what copies between `device` and host memory."""
    return HostCopier() if device.type == "cpu" else StreamCopier(device)


def _count_out(counts: CopyCounts, slot_N: Tensor) -> None:
    counts.out += 1
    counts.out_bytes += slot_N.nbytes


def _count_back(counts: CopyCounts, slot_N: Tensor) -> None:
    counts.back += 1
    counts.back_bytes += slot_N.nbytes
