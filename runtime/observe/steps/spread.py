"""What each of some steps took on all ranks: least, median and most. Exchanged with the waits (`wait_report.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dsrun.contract.step_records import PHASES, SPREAD_EVENT, SpreadRecord, StepSpread, spread_fields

from ..records import RecordWriter

#: Figures of a step, in the order in which ranks send them.
NAMES = (*PHASES, "waits", "pipeline_wait")
#: Tiers of memory, likewise.
TIERS = ("gpu", "cpu", "disk")
_DIGITS = 6


class SpreadOfSteps:
    """Keeps the seconds of this rank's last steps, and compares them with the others'.

    Args:
        steps: Steps of a comparison.
        records: Writer of the run's records.
        memory: Function that returns the bytes in use by tier.
    """

    def __init__(self, steps: int, records: RecordWriter, *, memory: Callable[[], Mapping[str, int]]) -> None:
        self._steps = steps
        self._records = records
        self._memory = memory
        self._last: deque[list[float]] = deque(maxlen=steps)
        #: Numbers that a rank sends.
        self.numel = steps * len(NAMES) + len(TIERS)

    def end_step(self, seconds: Mapping[str, float]) -> None:
        """Takes what a step took on this rank: seconds by `NAMES`, of which those that are missing are 0."""
        self._last.append([seconds.get(name, 0.0) for name in NAMES])

    def fill(self, numbers_N: Tensor) -> None:
        """Writes what this rank sends into memory of the host."""
        rows = [value for step in self._last for value in step]
        numbers_N.zero_()
        numbers_N[: len(rows)] = torch.tensor(rows, dtype=numbers_N.dtype)
        memory = self._memory()
        for place, tier in enumerate(TIERS, self._steps * len(NAMES)):
            numbers_N[place] = float(memory.get(tier, 0))

    def record(self, numbers_RN: Tensor, *, step: int, steps: int) -> None:
        """Records what the ranks have sent; the first one calls.

        Args:
            numbers_RN: Numbers of each rank, see `fill`; on the host.
            step: Number of the last step.
            steps: Number of steps.
        """
        seconds_RSF = numbers_RN[:, : steps * len(NAMES)].view(len(numbers_RN), steps, len(NAMES))
        memory_RT = numbers_RN[:, self._steps * len(NAMES) :]
        record = SpreadRecord(
            step=step,
            steps=steps,
            ranks=len(numbers_RN),
            seconds={
                name: _spread(seconds_RSF[:, :, place])
                for place, name in enumerate(NAMES)
                if bool(seconds_RSF[:, :, place].any())
            },
            memory={
                tier: _spread(memory_RT[:, place : place + 1])
                for place, tier in enumerate(TIERS)
                if bool(memory_RT[:, place].any())
            },
        )
        self._records.write_behind(SPREAD_EVENT, partial(spread_fields, record))


def _spread(values_RS: Tensor) -> StepSpread:
    return StepSpread(
        least=_rounded(values_RS.amin(0).tolist()),
        median=_rounded(values_RS.quantile(0.5, dim=0).tolist()),
        most=_rounded(values_RS.amax(0).tolist()),
        most_rank=int(values_RS.sum(1).argmax()),
    )


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(value, _DIGITS) for value in values)
