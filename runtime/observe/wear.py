"""What a run has read from and written to disks past the page cache: with each step's record, and once at its end.

Drives last for so many bytes written, so what a day of this run writes is said beside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from dsrun.direct_io.counts import IoCounts
from dsrun.units import format_bytes

from .records import RecordWriter

_DAY_S = 86_400


class DiskWear:
    """What rank 0 says about its files on disks.

    Args:
        counts: function that returns what was moved to and from the disks so far.
        paths: folders of the files.
        records: writer of the record at the end.
        rank: rank of this process; only rank 0 reports.
        clock: seconds now.
    """

    def __init__(
        self,
        counts: Callable[[], IoCounts],
        paths: Sequence[str],
        records: RecordWriter,
        *,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self._paths = list(paths)
        self._records = records
        self._rank = rank
        self._clock = clock
        self._begun_s = clock()
        self._at_first = self._last = counts()
        self._steps = 0
        # A script that forks takes a copy of this object along, which has nothing to report.
        self._process = os.getpid()

    def take_step(self) -> dict[str, int]:
        """Counts a step; returns what was moved since the last one, as its record has it.

        An update goes on behind its step, so what it moves is told with the next one.
        """
        now = self._counts()
        moved, self._last = now.since(self._last), now
        self._steps += 1
        return {"disk_read_bytes": moved.read_bytes, "disk_written_bytes": moved.written_bytes}

    def report(self) -> None:
        """Prints and records the whole run, the first time it is called after a step."""
        if self._rank != 0 or not self._steps or self._process != os.getpid():
            return
        self._process = -1
        moved, seconds = self._counts().since(self._at_first), self._clock() - self._begun_s
        a_step, a_day = moved.written_bytes // self._steps, round(moved.written_bytes / max(seconds, 1e-9) * _DAY_S)
        self._records.write(
            "disk_wear",
            {
                "paths": self._paths,
                "steps": self._steps,
                "read_bytes": moved.read_bytes,
                "written_bytes": moved.written_bytes,
                "written_bytes_a_step": a_step,
                "written_bytes_a_day": a_day,
            },
        )
        print(
            f"dsrun: rank 0 has written {format_bytes(moved.written_bytes)} to {', '.join(self._paths)}: "
            f"{format_bytes(a_step)} a step, {format_bytes(a_day)} a day at this pace",
            flush=True,
        )
