"""What a step took on this rank: its seconds by phase, its waits, the memory it holds and the bytes it has sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dsrun.memory_use.samples import CPU, GPU

from ...mesh.wait_times import WaitTimes
from ..memory import resident_bytes
from .phase_times import PhaseTimes
from .spread import SpreadOfSteps

#: Tier of the drives.
DISK = "disk"


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one step on one rank, as `StepRecord` has them.

    Attributes:
        phases: Seconds by phase.
        waits_s: Seconds of waits for other ranks.
        pipeline_wait_s: Seconds of these for other pipeline stages.
        traffic: Bytes handed to collectives and messages, by axis.
    """

    phases: Mapping[str, float]
    waits_s: float
    pipeline_wait_s: float
    traffic: Mapping[str, int]


class StepFigures:
    """Takes the figures of each step of this rank.

    Args:
        phases: Seconds by phase.
        waits: Waits for other ranks.
        moved: Function that returns the bytes moved so far, by axis.
        spread: Comparison with the other ranks, which gets each step; None: there are none to compare.
    """

    def __init__(
        self,
        phases: PhaseTimes,
        waits: WaitTimes,
        *,
        moved: Callable[[], Mapping[str, int]],
        spread: SpreadOfSteps | None,
    ) -> None:
        self._phases = phases
        self._waits = waits
        self._moved = moved
        self._spread = spread
        self._waited_s = self._between_stages_s = 0.0
        self._before: Mapping[str, int] = {}

    def take(self) -> Figures:
        """Returns the figures since the last call; each rank calls once a step."""
        phases = self._phases.take_step()
        waited_s, self._waited_s = self._waits.total_s - self._waited_s, self._waits.total_s
        between_s = self._waits.between_stages_s - self._between_stages_s
        self._between_stages_s = self._waits.between_stages_s
        moved, before = self._moved(), self._before
        self._before = moved
        traffic = {axes: count - before.get(axes, 0) for axes, count in moved.items() if count > before.get(axes, 0)}
        if self._spread is not None:
            self._spread.end_step({**phases, "waits": waited_s, "pipeline_wait": between_s})
        return Figures(phases, waited_s, between_s, traffic)


def memory_by_tier(device: torch.device, *, on_drives: int) -> tuple[int, dict[str, int]]:
    """Returns the most bytes of the device so far, and the bytes in use by tier; a CPU has what is resident.

    Args:
        device: Device that the model is on.
        on_drives: Bytes on drives.
    """
    resident = resident_bytes()
    outside = {CPU: resident, **({DISK: on_drives} if on_drives else {})}
    if device.type != "cuda":
        return resident, outside
    stats = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return stats["peak"], {GPU: stats["current"], **outside}
