"""The random generators that every Python program has: Python's own, numpy's where it is loaded, torch's of the CPU.

Takes their states, puts them back and seeds them, in this process; and finds the torch generators of a device. Knows
nothing of ranks or files.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NUMPY_SEEDS = 1 << 32


@dataclass(frozen=True, slots=True)
class HostGenerators:
    """States at one moment.

    Attributes:
        python: state of the module `random`, as its `getstate` returns it.
        numpy: state of `numpy.random`'s global generator, as its `get_state(legacy=False)` returns it; None where numpy
            was not loaded.
        torch: state of torch's default generator on the CPU, uint8.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: Tensor


def capture_host() -> HostGenerators:
    """Returns the present states."""
    numpy: Any = sys.modules.get("numpy")
    return HostGenerators(
        random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False), torch.get_rng_state()
    )


def restore_host(states: HostGenerators) -> None:
    """Puts states back; numpy's only where it is loaded, for nobody draws from it elsewhere."""
    random.setstate(states.python)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and states.numpy is not None:
        numpy.random.set_state(states.numpy)
    torch.set_rng_state(states.torch)


def seed_host(seed: int) -> None:
    """Seeds all three; no device's, unlike `torch.manual_seed`.

    Args:
        seed: 0 <= seed < 2^64; numpy takes its lower 32 bits.
    """
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)


@contextmanager
def host_kept() -> Generator[None]:
    """Whatever is drawn and seeded inside, outside nothing has been."""
    before = capture_host()
    try:
        yield
    finally:
        restore_host(before)


def generators_of(device: torch.device | None) -> list[torch.Generator]:
    """Returns torch's default generators that a computation may draw from: the CPU's, and a device's own.

    Args:
        device: device that computes; None: the CPU.
    """
    generators = [torch.default_generator]
    if device is not None and device.type != "cpu":
        module: Any = torch.get_device_module(device)
        index: Any = device.index
        generators.append(module.default_generators[module.current_device() if index is None else index])
    return generators
