"""One line about how training goes, from the runtime's records: step, loss, speed, memory, time left. Draws nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.units import format_bytes, format_count, format_duration

from ..records.follow import read_line

#: Steps whose mean duration the time left is reckoned from.
_AVERAGED_STEPS = 20
#: Most bytes of records looked at in one go; of what lies before them the newest step makes the line anyway.
_MOST_BYTES = 1 << 18


class RecordTail:
    """The records that were added to a run's file since they were last read.

    Args:
        folder: the job's; the file may come later.
    """

    def __init__(self, folder: Path) -> None:
        self._path = JobPaths(folder).records
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """Returns new records, oldest first; a line that is not whole yet waits."""
        try:
            size = self._path.stat().st_size
            if size <= self._position:
                return []
            with self._path.open("rb") as file:
                skipped = size - self._position > _MOST_BYTES
                file.seek(size - _MOST_BYTES if skipped else self._position)
                data = file.read(_MOST_BYTES)
        except OSError:
            # No file yet, or a folder that was taken away: there is no news.
            return []
        end = data.rfind(b"\n") + 1
        self._position = max(size - _MOST_BYTES, self._position) + end
        lines = data[:end].splitlines()[1 if skipped else 0 :]
        return [record for line in lines if (record := read_line(line)) is not None]


class ProgressLine:
    """What the newest step says.

    Fields that a record lacks are left out: `total_steps`, `tokens_per_s`, `model_tflops` and `memory_bytes` are there
    only where the runtime knows them.
    """

    def __init__(self) -> None:
        self._newest: Mapping[str, Any] = {}
        self._seconds: deque[float] = deque(maxlen=_AVERAGED_STEPS)

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes a record; those that are no steps change nothing."""
        step = _number(record, "step")
        # With several engines in a process the first one's steps are told.
        if record.get("event") != "step" or record.get("engine") or step is None:
            return
        if step <= (_number(self._newest, "step") or 0):
            # The job began anew from a checkpoint, perhaps on another number of ranks.
            self._seconds.clear()
        self._newest = record
        seconds = _number(record, "seconds")
        if seconds is not None:
            self._seconds.append(seconds)

    def text(self) -> str:
        """Returns the line; empty before the first step."""
        newest = self._newest
        step = _number(newest, "step")
        if step is None:
            return ""
        total, loss = _number(newest, "total_steps"), _number(newest, "loss")
        parts = [f"step {step:.0f}" if total is None else f"step {step:.0f}/{total:.0f}"]
        if "loss" in newest:
            # The writer leaves out what JSON has no word for: infinite, or not a number.
            parts.append("loss not finite" if loss is None else f"loss {loss:.4g}")
        if (tokens := _number(newest, "tokens_per_s")) is not None:
            parts.append(f"{format_count(tokens).replace('K', 'k')} tokens/s")
        if (tflops := _number(newest, "model_tflops")) is not None:
            parts.append(f"{tflops:.3g} TFLOP/s")
        if (memory := _number(newest, "memory_bytes")) is not None:
            parts.append(format_bytes(memory))
        if total is not None and self._seconds and step < total:
            left_s = (total - step) * sum(self._seconds) / len(self._seconds)
            parts.append(f"ETA {format_duration(left_s)}")
        return "  ".join(parts)


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
