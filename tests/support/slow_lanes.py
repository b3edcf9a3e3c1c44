"""Buses whose every copy comes as late as it may, both ways: whoever forgets to wait for one finds NaN, or other bits.

On the CPU a copy is made when somebody waits for it, in that thread, and not before: what it reads is read then, and
what it writes holds bytes of ones from its start on (NaN in every floating dtype). On CUDA each copy sleeps on its lane
before it is made, and its target holds bytes of ones meanwhile.

[Note: two ways to wait] `Bus.wait` is for the device, and `Event.synchronize` for the host. A copy to the host that the
device alone has waited for has read its source on the CPU, and has written nothing that the host may read: its target
is written when the host waits too, or when a later copy to the device reads it behind that wait.
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
        lock = threading.RLock()
        self._to_host = _LateLane(lock)
        self._to_device = _LateLane(lock, behind=self._to_host)
        lanes: Any = (self._to_host, self._to_device)
        self._out, self._back = lanes

    @property
    def unmade(self) -> int:
        """Copies that the host has not waited for."""
        return len(self._to_host.queue) + len(self._to_device.queue)

    def wait(self, event: Event) -> None:
        """See `Bus`, and [Note: two ways to wait]."""
        if isinstance(event, _LateCopy):
            event.order()
        else:
            event.synchronize()


class SleepyBus(StreamBus):
    """A bus of CUDA streams, see the head of this file.

    Args:
        device: the GPU.
        cycles: cycles of the GPU's clock that each copy sleeps.
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


class _LateLane:
    """One way of a `LateBus`: copies are made in the order in which they were started.

    Args:
        lock: lock that both directions share, so that one thread copies at a time.
        behind: the way to the host, whose copies this one's may read the targets of; None: this is it.
    """

    def __init__(self, lock: threading.RLock, *, behind: _LateLane | None = None) -> None:
        self.lock = lock
        self.queue: deque[_LateCopy] = deque()
        self._behind = behind
        self._followed_by: _LateLane | None = None
        if behind is not None:
            behind._followed_by = self

    def start(self, source_N: Tensor, target_N: Tensor, *, after: Sequence[Event], **order: Any) -> Event:
        """Takes note of a copy."""
        del order
        with self.lock:
            copy = _LateCopy(self, source_N, target_N, after)
            self.queue.append(copy)
            self._poison()
            return copy

    def make(self, wanted: _LateCopy) -> None:
        """Makes copies up to this one."""
        with self.lock:
            while not wanted.is_made:
                copy = self.queue[0]
                copy.wait_for_others()
                self.queue.popleft()
                if self._behind is not None:
                    self._behind.make_what_was_read()
                copy.target_N.copy_(copy.source_N)
                copy.is_made = True
                self._poison()

    def order(self, wanted: _LateCopy) -> None:
        """Lets copies up to this one be seen by the device: made, or read where they go to the host."""
        with self.lock:
            if self._behind is not None:
                self.make(wanted)
            elif not wanted.is_made:
                for copy in list(self.queue):
                    if not copy.is_read:
                        copy.wait_for_others()
                        copy.source_N = copy.source_N.clone()
                        copy.is_read = True
                    if copy is wanted:
                        return

    def make_what_was_read(self) -> None:
        """Makes the copies that the device has waited for."""
        while self.queue and self.queue[0].is_read:
            self.make(self.queue[0])

    def finish(self) -> None:
        """Makes all copies."""
        with self.lock:
            if self.queue:
                self.make(self.queue[-1])

    def _poison(self) -> None:
        """Poisons targets that nothing may read, or write, any more which their copies come after."""
        for lane in (self._behind, self, self._followed_by):
            for copy in () if lane is None else lane.queue:
                if not copy.is_poisoned and all(event.query() for event in copy.after):
                    copy.is_poisoned = True
                    _bytes(copy.target_N).fill_(_POISON)


class _LateCopy:
    """A copy of a `LateBus`, made when it is waited for."""

    def __init__(self, lane: _LateLane, source_N: Tensor, target_N: Tensor, after: Sequence[Event]) -> None:
        self._lane = lane
        self.source_N = source_N
        self.target_N = target_N
        self.after = after
        self.is_poisoned = False
        self.is_read = False
        self.is_made = False

    def wait_for_others(self) -> None:
        """Waits for the copies that it comes after."""
        for event in self.after:
            event.synchronize()

    def query(self) -> bool:
        """See `Event`."""
        return self.is_made

    def synchronize(self) -> None:
        """See `Event`."""
        self._lane.make(self)

    def order(self) -> None:
        """See `Bus.wait`."""
        self._lane.order(self)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
