"""How fast a bus and the host's memory are, measured in tens of milliseconds by copies and steps of a few megabytes.

What follows from the figures is not decided here. Copies go over the bus itself, which counts them as "states"; where
ranks share a host and measure at once, each sees what is left to it, as in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim

from .bus import Bus
from .host_pool import HostPool

#: Bytes of one copy: enough for a link's full speed, and soon over on a slow one.
COPY_BYTES = 16 << 20
#: Elements of one step on the host: masters, gradients and two states do not fit a cache.
STEP_NUMEL = 2 << 20
#: What such a step reads and writes of an element: gradient, master and two states in, all but the gradient out.
_STEP_BYTES = 28
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class BusSpeeds:
    """Bytes a second, each way."""

    out: float
    back: float


def measure_bus(bus: Bus, pool: HostPool, device: torch.device, *, nbytes: int = COPY_BYTES) -> BusSpeeds:
    """Returns the speeds of copies between the device and host memory, the best of three each way.

    Moves 4 times `nbytes` each way. Memory of that size is taken on both sides and given back.

    Args:
        bus: bus between the device and host memory.
        pool: pool that makes the host memory in the same way as for real copies.
        device: the other side.
        nbytes: bytes of one copy.
    """
    there = torch.empty(nbytes, dtype=torch.uint8, device=device).zero_()
    here = pool.zeros(nbytes, dtype=torch.uint8)
    out = _best(lambda: bus.start_out(there, here, kind="states").synchronize())
    back = _best(lambda: _arrive(bus, here, there))
    return BusSpeeds(nbytes / out, nbytes / back)


def measure_step(*, numel: int = STEP_NUMEL) -> float:
    """Returns bytes a second of a step of Adam on the host, with as many threads as torch's operations use here.

    Args:
        numel: elements, of four fp32 tensors.
    """
    leaf = nn.Parameter(torch.zeros(numel))
    leaf.grad = torch.ones(numel)
    adam = optim.AdamW([leaf], lr=1e-3, fused=True)
    return numel * _STEP_BYTES / _best(adam.step)


def _arrive(bus: Bus, here: Tensor, there: Tensor) -> None:
    event = bus.start_back(here, there, kind="states")
    event.synchronize()
    bus.wait(event)


def _best(work: Callable[[], object]) -> float:
    """Returns the least seconds of some runs; the first one, which touches fresh memory, does not count."""
    work()
    seconds: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)
