"""What rank 0 of a job recorded of memory, read from the job's records. Judges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.memory_use.findings import GROWTH_EVENT, Growth
from dsrun.memory_use.samples import SAMPLE_EVENT, MemorySample, from_record
from dsrun.memory_use.stacks import HISTORY_EVENT, StacksAtPeak, stacks_from_record

from .follow import START_EVENT, records_of

_SUMMARY_EVENT = "memory"
_EVENTS = frozenset({START_EVENT, SAMPLE_EVENT, GROWTH_EVENT, HISTORY_EVENT, _SUMMARY_EVENT})


@dataclass(frozen=True, slots=True)
class MemoryRecords:
    """Records of the last attempt of a job.

    Attributes:
        samples: memory samples, in order of time.
        growths: findings that memory use between steps grew, in order of time.
        summary: fields of the record at the run's end; None while it runs, or if it was killed.
        stacks: call stacks that held memory at the peak of the first steps; None without `--memory-history`.
    """

    samples: tuple[MemorySample, ...]
    growths: tuple[Growth, ...]
    summary: dict[str, Any] | None
    stacks: StacksAtPeak | None = None

    @property
    def state(self) -> tuple[int, int] | None:
        """Bytes of model state, (predicted, measured), where the run has ended."""
        if self.summary is None:
            return None
        return self.summary["state_predicted_bytes"], self.summary["state_bytes"]


def read_memory_records(folder: Path) -> MemoryRecords | None:
    """Reads the records of a job; None where there are none.

    Args:
        folder: the job's.
    """
    samples: list[MemorySample] = []
    growths: list[Growth] = []
    summary: dict[str, Any] | None = None
    stacks: StacksAtPeak | None = None
    try:
        for record in records_of(JobPaths(folder).records, _EVENTS):
            match record.pop("event"):
                case event if event == START_EVENT:
                    # The job was started again: its memory is that of other processes.
                    samples, growths, summary, stacks = [], [], None, None
                case event if event == SAMPLE_EVENT:
                    samples.append(from_record(record))
                case event if event == GROWTH_EVENT:
                    growths.append(Growth(**{k: v for k, v in record.items() if k != "time"}))
                case event if event == HISTORY_EVENT:
                    stacks = stacks_from_record(record)
                case _:
                    summary = record
    except FileNotFoundError:
        return None
    return MemoryRecords(tuple(samples), tuple(growths), summary, stacks)
