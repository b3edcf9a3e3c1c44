"""Buses whose every copy comes as late as it may, both ways: whoever forgets to wait for one finds NaN, or other bits.

On the CPU a copy is made when somebody waits for it, in that thread, and not before: what it reads is read then, and
what it writes holds bytes of ones from its start on (NaN in every floating dtype). On CUDA each copy sleeps on its lane
before it is made, and its target holds bytes of ones meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsrun.runtime.memory.bus import Bus, Event, StreamBus, ThreadBus

#: Some 5 ms of a GPU: more than the host needs to enqueue a block of a small model.
CYCLES = 10_000_000
_POISON = 0xFF


def late_bus(device: torch.device) -> Bus:
    """Returns the late bus of a device."""
    return LateBus() if device.type == "cpu" else SleepyBus(device)


class LateBus(ThreadBus):
    """Where the device is the CPU: no thread copies anything, but who waits for a copy makes it."""

    def __init__(self) -> None:
        super().__init__()
        queues = _Queues()
        lanes: Any = (_LateLane(queues), _LateLane(queues))
        self._out, self._back = lanes

    @property
    def unmade(self) -> int:
        """Copies that nobody has waited for."""
        lanes: Any = (self._out, self._back)
        return sum(len(lane.queue) for lane in lanes)


class SleepyBus(StreamBus):
    """A bus of CUDA streams, see the head of this file.

    Args:
        device: the GPU.
        cycles: of its clock that each copy sleeps.
    """

    def __init__(self, device: torch.device, *, cycles: int = CYCLES) -> None:
        super().__init__(device)
        self._cycles = cycles
        self._tokens = torch.zeros(2, device=device)

    def _start(self, lane: Any, source_N: Tensor, target_N: Tensor, **order: Any) -> Any:
        # A copy of nothing much first: it has the lane wait for all that the real one waits for.
        super()._start(lane, self._tokens[:1], self._tokens[1:], **order)
        with self._on(lane):
            ones = torch.full((source_N.nbytes,), _POISON, dtype=torch.uint8, device=self._device)
            _bytes(target_N).copy_(ones, non_blocking=True)
            torch.cuda._sleep(self._cycles)
        return super()._start(lane, source_N, target_N, **order)


class _Queues:
    """What the lanes of a bus share: one thread copies at a time, and targets are poisoned when they may be."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clean: list[_LateCopy] = []  # whose target may still be read, or written, by copies they come after

    def poison(self) -> None:
        """Poisons the targets of copies that come after nothing any more."""
        still: list[_LateCopy] = []
        for copy in self.clean:
            if all(event.query() for event in copy.after):
                _bytes(copy.target_N).fill_(_POISON)
            else:
                still.append(copy)
        self.clean = still


class _LateLane:
    """One way of a `LateBus`: copies are made in the order in which they were started."""

    def __init__(self, queues: _Queues) -> None:
        self._queues = queues
        self.queue: deque[_LateCopy] = deque()

    def start(self, source_N: Tensor, target_N: Tensor, *, after: Sequence[Event], **order: Any) -> Event:
        """Takes note of a copy."""
        del order
        with self._queues.lock:
            copy = _LateCopy(self, source_N, target_N, after)
            self.queue.append(copy)
            self._queues.clean.append(copy)
            self._queues.poison()
            return copy

    def make(self, wanted: _LateCopy) -> None:
        """Makes copies up to this one."""
        with self._queues.lock:
            while not wanted.is_made:
                copy = self.queue.popleft()
                for event in copy.after:
                    event.synchronize()
                self._queues.clean = [other for other in self._queues.clean if other is not copy]
                copy.target_N.copy_(copy.source_N)
                copy.is_made = True
                self._queues.poison()

    def finish(self) -> None:
        """Makes all copies."""
        with self._queues.lock:
            if self.queue:
                self.make(self.queue[-1])


class _LateCopy:
    """A copy of a `LateBus`, made when it is waited for."""

    def __init__(self, lane: _LateLane, source_N: Tensor, target_N: Tensor, after: Sequence[Event]) -> None:
        self._lane = lane
        self.source_N = source_N
        self.target_N = target_N
        self.after = after
        self.is_made = False

    def query(self) -> bool:
        """See `Event`."""
        return self.is_made

    def synchronize(self) -> None:
        """See `Event`."""
        self._lane.make(self)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
