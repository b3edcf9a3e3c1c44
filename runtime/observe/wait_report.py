"""What the ranks wait in, side by side: every few steps they tell each other, and rank 0 records it. Judges nobody.

[Note: exchange of waits] Who is late shows in the others' waits, so waits must be compared over ranks: one all-gather
of 768 bytes a rank, every 20 optimizer steps and only where dsrun records the run. It is counted in the traffic of its
axis, as every collective is. Labels are told by a checksum, for a rank knows its own: those that it waited in longest
have a row each, and the last row is all others. On CUDA the host waits for nothing: what was gathered is copied to it
on the stream, and written a step later, when the host has read the norm behind it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from dsrun.contract.wait_records import OTHER_LABEL, WAITS_EVENT, WaitRecord, WaitSpread, to_fields

from ..mesh.collectives import Collectives
from ..mesh.wait_times import Waited, WaitTimes, waited_since
from .records import RecordWriter

#: Optimizer steps between two records.
STEPS_PER_RECORD = 20
#: Rows that a rank tells, the last one for what has none of its own: checksum of the label, waits, seconds.
_ROWS, _COLUMNS = 32, 3
#: Labels of a record: as much as is read, in 2 KB.
_MOST_LABELS = 12
#: Of the last row.
_NO_LABEL = 0.0
_LABEL = "waits of the ranks"

Row = Sequence[float]


@dataclass(frozen=True, slots=True)
class _Due:
    """An exchange that rank 0 has not recorded yet.

    Attributes:
        step: Number of the last step.
        steps: Number of steps.
        step_s: Seconds a step.
        names: Labels by checksum, as rank 0 knows them.
        copied: Event behind the copy to the host; None where there was none.
    """

    step: int
    steps: int
    step_s: float
    names: dict[float, str]
    copied: Any


class WaitReport:
    """Compares the waits of the ranks, see [Note: exchange of waits]; every rank must make one and end its steps.

    Args:
        waits: Waits of this rank.
        collectives: All ranks.
        records: Writer of the run's records.
        device: Device of the collectives' tensors.
        is_recorded: Whether the run is recorded; the same on every rank.
        clock: Seconds, by a clock that does not go back.
    """

    def __init__(
        self,
        waits: WaitTimes,
        collectives: Collectives,
        records: RecordWriter,
        *,
        device: torch.device,
        is_recorded: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._waits = waits
        self._collectives = collectives
        self._records = records
        self._clock = clock
        self._exchanges = is_recorded and collectives.size > 1
        self._steps = 0
        self._begun_s = 0.0
        self._before: dict[str, Waited] | None = None
        self._due: _Due | None = None
        if self._exchanges:
            is_apart = device.type == "cuda"
            numel = _ROWS * _COLUMNS
            self._mine = torch.zeros(numel, dtype=torch.float64, pin_memory=is_apart)
            self._sent = torch.zeros_like(self._mine, device=device) if is_apart else self._mine
            self._everyone = torch.zeros(collectives.size * numel, dtype=torch.float64, device=device)
            self._read = (
                torch.zeros(collectives.size * numel, dtype=torch.float64, pin_memory=True)
                if is_apart
                else self._everyone
            )

    def end_step(self, step: int) -> None:
        """An optimizer step is over; every rank must call. Enters an all-gather every so many steps.

        Args:
            step: Number of the step.
        """
        self._waits.end_step()
        if not self._exchanges:
            return
        self._record_due()
        if self._before is None:
            # The first step waits for whatever building and compiling took: no step is like it.
            self._before, self._begun_s = self._waits.snapshot(), self._clock()
            return
        self._steps += 1
        if self._steps == STEPS_PER_RECORD:
            self._exchange(step)

    def _exchange(self, step: int) -> None:
        now, now_s = self._waits.snapshot(), self._clock()
        rows = rows_of(waited_since(now, self._before or {}))
        self._mine.copy_(torch.tensor(rows, dtype=torch.float64).view(-1))
        copied = None
        if self._sent is not self._mine:
            self._sent.copy_(self._mine, non_blocking=True)
        self._collectives.all_gather(self._everyone, self._sent, label=_LABEL).wait()
        if self._collectives.rank == 0:
            if self._read is not self._everyone:
                self._read.copy_(self._everyone, non_blocking=True)
                copied = torch.cuda.current_stream(self._everyone.device).record_event()
            names = {float(crc32(name.encode())): name for name in now}
            self._due = _Due(step, self._steps, (now_s - self._begun_s) / self._steps, names, copied)
            if copied is None:
                self._record_due()
        self._before, self._begun_s, self._steps = now, now_s, 0

    def _record_due(self) -> None:
        """Records the last exchange, as soon as the host has it."""
        due = self._due
        if due is None or (due.copied is not None and not due.copied.query()):
            return
        self._due = None
        rows = self._read.view(self._collectives.size, _ROWS, _COLUMNS).tolist()
        record = compare(rows, due.names, step=due.step, steps=due.steps, step_s=due.step_s)
        self._records.write(WAITS_EVENT, to_fields(record))


def rows_of(waits: Mapping[str, Waited]) -> list[Row]:
    """Returns what a rank tells of its waits, see [Note: exchange of waits]; always the same number of rows."""
    longest = sorted(waits.items(), key=lambda item: -item[1].seconds)
    shown, rest = longest[: _ROWS - 1], longest[_ROWS - 1 :]
    rows: list[Row] = [(float(crc32(name.encode())), each.calls, each.seconds) for name, each in shown]
    rows += [(_NO_LABEL, 0, 0.0)] * (_ROWS - 1 - len(shown))
    rows.append((_NO_LABEL, sum(each.calls for _, each in rest), sum(each.seconds for _, each in rest)))
    return rows


def compare(
    rows: Sequence[Sequence[Row]], names: Mapping[float, str], *, step: int, steps: int, step_s: float
) -> WaitRecord:
    """Returns what ranks have told of their waits, side by side.

    A rank that does not tell a label counts as one that waited 0 s there: it waited longer in all that it tells.

    Args:
        rows: Rows of each rank, see `rows_of`, by rank.
        names: Labels by checksum; what is none of them counts as "other".
        step: Number of the last step.
        steps: Number of steps.
        step_s: Seconds a step.
    """
    size = len(rows)
    seconds: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {}
    for rank, theirs in enumerate(rows):
        for code, count, waited_s in theirs:
            if count:
                name = names.get(code, OTHER_LABEL)
                calls.setdefault(name, [0.0] * size)[rank] += count / steps
                seconds.setdefault(name, [0.0] * size)[rank] += waited_s / steps
    total = _spread("all", _sums(calls, size), _sums(seconds, size))
    named = sorted((name for name in seconds if name != OTHER_LABEL), key=lambda name: -max(seconds[name]))
    kept, rest = named[:_MOST_LABELS], named[_MOST_LABELS:]
    rest += [OTHER_LABEL] if OTHER_LABEL in seconds else []
    labels = [_spread(name, calls[name], seconds[name]) for name in kept]
    if rest:
        others = _sums({name: calls[name] for name in rest}, size), _sums({name: seconds[name] for name in rest}, size)
        labels.append(_spread(OTHER_LABEL, *others))
    return WaitRecord(step=step, steps=steps, step_s=round(step_s, 6), ranks=size, total=total, labels=tuple(labels))


def _sums(by_name: Mapping[str, Sequence[float]], size: int) -> list[float]:
    return [sum(each[rank] for each in by_name.values()) for rank in range(size)]


def _spread(label: str, calls: Sequence[float], seconds: Sequence[float]) -> WaitSpread:
    ranks = range(len(seconds))
    least, most = min(ranks, key=seconds.__getitem__), max(ranks, key=seconds.__getitem__)
    return WaitSpread(
        label=label,
        waits=round(max(calls), 3),
        least_s=round(seconds[least], 6),
        median_s=round(statistics.median(seconds), 6),
        most_s=round(seconds[most], 6),
        least_rank=least,
        most_rank=most,
    )
