"""What the ranks of a job waited in, read from its records; and which ranks the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.wait_records import OTHER_LABEL, WAITS_EVENT, WaitRecord, WaitSpread, collective_kind, from_fields

from ..failures.stragglers import is_slow, medians_of_others
from .follow import START_EVENT, records_of


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """Ranks that the others wait for; of where, nothing is known in a record that has them in none of its rows.

    Attributes:
        ranks: numbers of the ranks, in order.
        lost_s: seconds a step that the others wait longer than they do, in all collectives together.
        kind: kind of collective in which they do most; empty where it is not known.
        kind_s: seconds a step that they wait longer there.
        collective: name of the collective of that kind in which they do most; empty where it is not known.
        collective_s: seconds a step that they wait longer there.
    """

    ranks: tuple[int, ...]
    lost_s: float
    kind: str
    kind_s: float
    collective: str
    collective_s: float


def read_waits(folder: Path) -> WaitRecord | None:
    """Reads the newest record of waits of a job's last attempt; None where there is none.

    Args:
        folder: the job's.
    """
    newest: WaitRecord | None = None
    with suppress(FileNotFoundError):
        for record in records_of(JobPaths(folder).records, (START_EVENT, WAITS_EVENT)):
            if record["event"] == START_EVENT:
                # The job was started again: its ranks are other processes.
                newest = None
                continue
            with suppress(KeyError, TypeError):  # another version's
                newest = from_fields(record)
    return newest


@dataclass(frozen=True, slots=True)
class RankLag:
    """How one rank compares with the others; their waits are what it takes longer than they do.

    Attributes:
        rank: number of the rank.
        own_s: seconds a step that it does not wait.
        others_s: median of that of the others.
        is_slow: whether the others wait for it, by the rule of `failures/stragglers.py`.
    """

    rank: int
    own_s: float
    others_s: float
    is_slow: bool

    @property
    def lag_s(self) -> float:
        """Seconds a step that it takes longer than the others; below 0 for one that is faster."""
        return self.own_s - self.others_s


def rank_lags(record: WaitRecord) -> list[RankLag]:
    """Returns how each rank of a record compares with the others; the slowest first.

    Args:
        record: the waits of all ranks.
    """
    total = record.total
    own_s = {rank: max(0.0, record.step_s - waited_s) for rank, waited_s in record.waited_s.items()}
    if len(own_s) == record.ranks > 1:
        others_s = medians_of_others(own_s)
    else:
        # Of many ranks the median of all stands for that of the others; of two ranks there is one other.
        waited_s = total.most_s if record.ranks == 2 else total.median_s
        own_s = own_s or {total.least_rank: max(0.0, record.step_s - total.least_s)}
        others_s = dict.fromkeys(own_s, max(0.0, record.step_s - waited_s))
    lags = [
        RankLag(rank, own, others_s[rank], is_slow(own, others_s=others_s[rank], step_s=record.step_s))
        for rank, own in own_s.items()
    ]
    return sorted(lags, key=lambda each: (-each.lag_s, each.rank))


def waited_for(record: WaitRecord) -> WaitedFor | None:
    """Returns the ranks that the others wait for; None where there are none, by the rule of `failures/stragglers.py`.

    Args:
        record: the waits of all ranks.
    """
    slow = _slow_ranks(record)
    if not slow:
        return None
    share = len(slow) / record.ranks
    # Only rows in which the others wait for one of these ranks: another rank's row says nothing of them.
    kind, kind_s = _longest([each for each in record.kinds if each.least_rank in slow], slow_share=share)
    labels = [each for each in record.labels if each.least_rank in slow and each.label != OTHER_LABEL]
    if kind:
        labels = [each for each in labels if collective_kind(each.label) == kind]
    collective, collective_s = _longest(labels, slow_share=share)
    lost_s = _lost_s(record.total, slow_share=share)
    return WaitedFor(tuple(sorted(slow)), lost_s, kind, kind_s, collective, collective_s)


def _slow_ranks(record: WaitRecord) -> set[int]:
    return {lag.rank for lag in rank_lags(record) if lag.is_slow}


def _longest(rows: Sequence[WaitSpread], *, slow_share: float) -> tuple[str, float]:
    lost_s = {each.label: _lost_s(each, slow_share=slow_share) for each in rows}
    label = max(lost_s, key=lost_s.__getitem__, default="")
    return label, lost_s.get(label, 0.0)


def _lost_s(spread: WaitSpread, *, slow_share: float) -> float:
    """Returns how much longer the others wait than the rank that waits least.

    Args:
        spread: the waits of all ranks.
        slow_share: ranks that the others wait for, of all ranks.
    """
    if slow_share > 0.5:
        lost_s = spread.most_s - spread.least_s
    else:
        # Of two halves that wait differently, the median lies in the middle between them.
        lost_s = (spread.median_s - spread.least_s) * (2 if slow_share == 0.5 else 1)
    return round(lost_s, 6)
