"""A line on memory by tier and kind after each step (`memory_breakdown`), on rank 0. Keeps and judges nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsrun.memory_use.samples import TierUse, parts_of
from dsrun.units import format_bytes

from .memory_watch import Kinds
from .tiers import read_tiers


class MemoryBreakdown:
    """Prints the lines; costs some system calls a step, and waits for no kernel.

    Args:
        device: device that the model is on.
        kinds: function that returns names and bytes of what is held for long there.
    """

    def __init__(self, device: torch.device, kinds: Kinds) -> None:
        self._device = device
        self._kinds = kinds

    def end_step(self, step: int) -> None:
        """Prints what each tier holds now."""
        print("\n".join(breakdown_lines(step, read_tiers(self._device, kinds=self._kinds()))), flush=True)

    def close(self) -> None:
        """Nothing is left to tell."""


def breakdown_lines(step: int, tiers: Sequence[TierUse]) -> list[str]:
    """Returns a line a tier: what it holds, its peak, and its kinds, the largest first.

    Args:
        step: number of the step that is over.
        tiers: tiers, the device's first.
    """
    lines: list[str] = []
    for use in tiers:
        parts = sorted(parts_of(use, None), key=lambda part: -part[1])
        kinds = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts)
        lines.append(
            f"dsrun: memory after step {step}: {use.tier} {format_bytes(use.held_bytes)}, "
            f"peak {format_bytes(use.peak_bytes)}{': ' if kinds else ''}{kinds}"
        )
    return lines
