"""What the ranks wait in, side by side: every few steps they exchange it, and rank 0 records it. Judges nobody.

[Note: exchange of waits] Who is late shows in the others' waits, so waits must be compared over ranks: one all-gather
of 6 KB a rank, and of 1.5 KB for what each step took (`steps/spread.py`), every 20 optimizer steps and only where dsrun
records the run. It is counted in the traffic of its axis,
as every collective is. Labels are sent as checksums, for a rank knows its own. A rank has a row for each of 255 labels,
and the last row is all others: those with the largest checksums, so that ranks leave out the same ones. A label that a
rank with others has not sent is unknown there, and is compared without it. Messages between pipeline stages are one
label: they have the names of the ranks that send them, which ranks do not share. On CUDA the host waits for nothing:
what was gathered is copied to it on the stream, and written a step later, when the host has read the norm behind it, or
at the end.

Shapes: R ranks, N rows of a rank, C = 3 columns of a row, L labels.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dsrun.contract.wait_records import (
    MOST_RANKS,
    OTHER_LABEL,
    WAITS_EVENT,
    WaitRecord,
    WaitSpread,
    collective_kind,
    to_fields,
)

from ..mesh.collectives import Collectives
from ..mesh.wait_times import Waited, WaitTimes, waited_since
from .records import RecordWriter
from .steps.spread import SpreadOfSteps

#: Optimizer steps between two records.
STEPS_PER_RECORD = 20
#: Rows that a rank sends, the last one for what has none of its own: checksum of the label, waits, seconds.
_ROWS, _COLUMNS = 256, 3
#: Labels of a record: as much as is read, in 2 KB.
_MOST_LABELS = 12
#: Of the last row.
_NO_LABEL = 0.0
_LABEL = "waits of the ranks"
_RECEIVE, _MESSAGES = "receive", "receive from other stages"

Row = Sequence[float]


@dataclass(frozen=True, slots=True)
class Exchange:
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


class UnrecordedExchange:
    """The exchange that rank 0 has not recorded yet; it knows nothing of the report, which may be gone by then.

    Args:
        records: Writer of the run's records.
        gathered: Rows of all ranks in host memory, once the exchange's copy has ended.
        size: Number of ranks.
        spread: Comparison of what steps took; None for none.
    """

    def __init__(
        self, records: RecordWriter, gathered: Tensor, *, size: int, spread: SpreadOfSteps | None = None
    ) -> None:
        self._records = records
        self._gathered_RN = gathered.view(size, -1)
        self._spread = spread
        self._exchange: Exchange | None = None

    def put(self, exchange: Exchange) -> None:
        """Takes an exchange, whose rows are on their way to the host."""
        self._exchange = exchange

    def record(self) -> None:
        """Records the exchange if the host has it; waits for nothing."""
        exchange = self._exchange
        if exchange is None or (exchange.copied is not None and not exchange.copied.query()):
            return
        self._exchange = None
        rows_RNC = self._gathered_RN[:, : _ROWS * _COLUMNS].unflatten(1, (_ROWS, _COLUMNS))
        record = compare(rows_RNC, exchange.names, step=exchange.step, steps=exchange.steps, step_s=exchange.step_s)
        self._records.write_behind(WAITS_EVENT, partial(to_fields, record))
        if self._spread is not None:
            numbers_RN = self._gathered_RN[:, _ROWS * _COLUMNS :]
            self._spread.record(numbers_RN, step=exchange.step, steps=exchange.steps)

    def record_at_end(self) -> None:
        """As `record`, where the device or the disk may have failed: the script has been told of that."""
        with suppress(RuntimeError, OSError):
            self.record()


class WaitReport:
    """Compares the waits of the ranks, see [Note: exchange of waits]; every rank must make one and end its steps.

    Args:
        waits: Waits of this rank.
        collectives: All ranks.
        records: Writer of the run's records.
        device: Device of the collectives' tensors.
        is_recorded: Whether the run is recorded; the same on every rank.
        spread: Comparison of what each step took, which goes with the waits; None for none, on every rank.
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
        spread: SpreadOfSteps | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._waits = waits
        self._collectives = collectives
        self._records = records
        self._clock = clock
        self._spread = spread
        self._exchanges = is_recorded and collectives.size > 1
        self._steps = 0
        self._begun_s = 0.0
        self._before: dict[str, Waited] | None = None
        if self._exchanges:
            is_apart = device.type == "cuda"
            numel = _ROWS * _COLUMNS + (0 if spread is None else spread.numel)
            self._mine = torch.zeros(numel, dtype=torch.float64, pin_memory=is_apart)
            self._sent = torch.zeros_like(self._mine, device=device) if is_apart else self._mine
            self._everyone = torch.zeros(collectives.size * numel, dtype=torch.float64, device=device)
            # Rank 0 alone reads them.
            self._read = (
                torch.zeros(collectives.size * numel, dtype=torch.float64, pin_memory=True)
                if is_apart and collectives.rank == 0
                else self._everyone
            )
            self._unrecorded = UnrecordedExchange(records, self._read, size=collectives.size, spread=spread)
            # No step may follow the last exchange.
            weakref.finalize(self, self._unrecorded.record_at_end)

    def end_step(self, step: int) -> None:
        """An optimizer step is over; every rank must call. Enters an all-gather every so many steps.

        Args:
            step: Number of the step.
        """
        self._waits.end_step()
        if not self._exchanges:
            return
        self._unrecorded.record()
        if self._before is None:
            # The first step waits for whatever building and compiling took: no step is like it.
            self._before, self._begun_s = self._waits.snapshot(), self._clock()
            return
        self._steps += 1
        if self._steps == STEPS_PER_RECORD:
            self._exchange(step)

    def _exchange(self, step: int) -> None:
        now, now_s = self._waits.snapshot(), self._clock()
        waits = with_messages_together(waited_since(now, self._before or {}))
        rows = rows_of(waits)
        self._mine[: _ROWS * _COLUMNS] = torch.tensor(rows, dtype=torch.float64).view(-1)
        if self._spread is not None:
            self._spread.fill(self._mine[_ROWS * _COLUMNS :])
        copied = None
        if self._sent is not self._mine:
            self._sent.copy_(self._mine, non_blocking=True)
        self._collectives.all_gather(self._everyone, self._sent, label=_LABEL).wait()
        if self._collectives.rank == 0:
            if self._read is not self._everyone:
                self._read.copy_(self._everyone, non_blocking=True)
                copied = torch.cuda.current_stream(self._everyone.device).record_event()
            names = {float(crc32(name.encode())): name for name in (*now, _MESSAGES)}
            self._unrecorded.put(Exchange(step, self._steps, (now_s - self._begun_s) / self._steps, names, copied))
            if copied is None:
                self._unrecorded.record()
        # What rank 0 needs to compare them is none of its next steps' own time.
        self._before, self._begun_s, self._steps = now, self._clock(), 0


def with_messages_together(waits: Mapping[str, Waited]) -> dict[str, Waited]:
    """Returns waits by collective, with those for messages of other pipeline stages under one label."""
    together = {name: each for name, each in waits.items() if collective_kind(name) != _RECEIVE}
    messages = [each for name, each in waits.items() if collective_kind(name) == _RECEIVE]
    if messages:
        together[_MESSAGES] = Waited(sum(each.calls for each in messages), sum(each.seconds for each in messages))
    return together


def rows_of(waits: Mapping[str, Waited]) -> list[Row]:
    """Returns what a rank sends of its waits, see [Note: exchange of waits]; always the same number of rows."""
    by_code = sorted((float(crc32(name.encode())), each.calls, each.seconds) for name, each in waits.items())
    shown, rest = by_code[: _ROWS - 1], by_code[_ROWS - 1 :]
    rows: list[Row] = [*shown, *([(_NO_LABEL, 0, 0.0)] * (_ROWS - 1 - len(shown)))]
    rows.append((_NO_LABEL, sum(calls for _, calls, _ in rest), sum(seconds for *_, seconds in rest)))
    return rows


def compare(rows_RNC: Tensor, names: Mapping[float, str], *, step: int, steps: int, step_s: float) -> WaitRecord:
    """Returns what ranks have sent of their waits, side by side.

    Args:
        rows_RNC: Rows of each rank, see `rows_of`; fp64, on the host.
        names: Labels by checksum; what is none of them counts as "other".
        step: Number of the last step.
        steps: Number of steps.
        step_s: Seconds a step.
    """
    waits = _by_label(rows_RNC, names, steps=steps)
    sizes = waits.most_L - waits.least_L
    named = [number for number, label in enumerate(waits.labels) if label != OTHER_LABEL]
    shown = sorted(named, key=lambda number: -waits.most_L[number].item())
    if len(shown) > _MOST_LABELS:
        # One of them is the one in which ranks differ most, which need not be among the longest.
        shown[_MOST_LABELS - 1 :] = [max(shown[_MOST_LABELS - 1 :], key=lambda number: sizes[number].item())]
    rest = [number for number in range(len(waits.labels)) if number not in shown]
    by_kind: dict[str, list[int]] = {}
    for number in named:
        if waits.known_LR[number].all():
            by_kind.setdefault(collective_kind(waits.labels[number]), []).append(number)

    labels = [waits.spread(waits.labels[number], [number]) for number in shown]
    kinds = [waits.spread(kind, numbers) for kind, numbers in by_kind.items()]
    waited_s = waits.seconds_LR.sum(0).tolist()
    shortest = sorted(range(len(waited_s)), key=waited_s.__getitem__)[:MOST_RANKS]
    return WaitRecord(
        step=step,
        steps=steps,
        step_s=round(step_s, 6),
        ranks=len(waited_s),
        total=waits.spread("all", list(range(len(waits.labels)))),
        labels=(*labels, *([waits.spread(OTHER_LABEL, rest)] if rest else [])),
        kinds=tuple(sorted(kinds, key=lambda each: -each.most_s)),
        waited_s={rank: round(waited_s[rank], 6) for rank in sorted(shortest)},
    )


@dataclass(frozen=True, slots=True)
class _Waits:
    """Waits a step by label and rank.

    Attributes:
        labels: Names of the labels in which a rank has waited.
        calls_LR: Number of waits.
        seconds_LR: Seconds, 0 where they are not known.
        known_LR: Whether they are known.
    """

    labels: list[str]
    calls_LR: Tensor
    seconds_LR: Tensor
    known_LR: Tensor

    @property
    def least_L(self) -> Tensor:
        """Seconds of the rank that waited least."""
        return self.seconds_LR.masked_fill(~self.known_LR, torch.inf).amin(1)

    @property
    def most_L(self) -> Tensor:
        """Seconds of the rank that waited most."""
        return self.seconds_LR.amax(1)

    def spread(self, name: str, numbers: list[int]) -> WaitSpread:
        """Returns the waits in some labels together, of the ranks that are known in one of them."""
        known_R = self.known_LR[numbers].any(0) if numbers else self.known_LR.new_ones(self.known_LR.shape[1])
        ranks: list[int] = known_R.nonzero().view(-1).tolist()
        summed_R: list[float] = self.seconds_LR[numbers].sum(0).tolist()
        seconds = {rank: summed_R[rank] for rank in ranks}
        least, most = min(ranks, key=seconds.__getitem__), max(ranks, key=seconds.__getitem__)
        return WaitSpread(
            label=name,
            waits=round(self.calls_LR[numbers].sum(0).max().item(), 3),
            least_s=round(seconds[least], 6),
            median_s=round(statistics.median(seconds.values()), 6),
            most_s=round(seconds[most], 6),
            least_rank=least,
            most_rank=most,
        )


def _by_label(rows_RNC: Tensor, names: Mapping[float, str], *, steps: int) -> _Waits:
    codes_RN, calls_RN, seconds_RN = rows_RNC.unbind(-1)
    ranks = len(rows_RNC)
    codes, which_RN = codes_RN.unique(return_inverse=True)
    label_of = [names.get(code, OTHER_LABEL) for code in codes.tolist()]
    labels = list(dict.fromkeys(label_of))
    numbers = {label: number for number, label in enumerate(labels)}
    at = (
        torch.tensor([numbers[label] for label in label_of])[which_RN],
        torch.arange(ranks)[:, None].expand_as(which_RN),
    )
    calls_LR, seconds_LR = (
        torch.zeros(len(labels), ranks, dtype=torch.float64).index_put_(at, each_RN / steps, accumulate=True)
        for each_RN in (calls_RN, seconds_RN)
    )
    # A rank without others has sent all its labels: it has waited 0 s in any that it has not sent.
    has_sent_all_R = calls_RN[:, -1] == 0
    has_waits_L = calls_LR.any(1)
    return _Waits(
        labels=[label for label, has_waits in zip(labels, has_waits_L.tolist(), strict=True) if has_waits],
        calls_LR=calls_LR[has_waits_L],
        seconds_LR=seconds_LR[has_waits_L],
        known_LR=((calls_LR > 0) | has_sent_all_R)[has_waits_L],
    )
