"""What `dsrun show JOB --waits` prints: the answer in words, and a table. Reads nothing."""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.contract.wait_records import WaitRecord
from dsrun.units import format_duration

from ..console.rank_set import format_rank_set
from ..failures.stragglers import LOST_SHARE
from ..jobs.text import align
from ..records.waits import WaitedFor, waited_for

_HEADING = ("COLLECTIVE", "WAITS", "LEAST", "MEDIAN", "MOST", "LEAST RANK", "MOST RANK")
#: A collective that has this much of its kind is told without the kind.
_MOSTLY = 0.8


def waits_lines(record: WaitRecord) -> list[str]:
    """Returns the answer in words, and a row for each collective; seconds and waits are those of one step."""
    rows = [
        (
            each.label,
            f"{each.waits:g}",
            *(f"{1000 * seconds:.2f}" for seconds in (each.least_s, each.median_s, each.most_s)),
            str(each.least_rank),
            str(each.most_rank),
        )
        for each in (*record.labels, record.total)
    ]
    first = record.step - record.steps + 1
    return [
        answer(record),
        "",
        f"steps {first} to {record.step}, {record.ranks} ranks, {format_duration(record.step_s)} a step; "
        "ms and waits are those of a step",
        *align([_HEADING, *rows]),
    ]


def answer(record: WaitRecord) -> str:
    """Returns in words whom the ranks wait for."""
    found = waited_for(record)
    if found is not None:
        return f"{_ranks(found.ranks)} waited for: the others wait {_where(found, record.step_s)}"
    if not record.labels:
        return "no rank has waited"
    apart_s = record.total.most_s - record.total.least_s
    if apart_s >= LOST_SHARE * record.step_s:
        return f"no rank stands out, but waits differ by {format_duration(apart_s)} a step: {_extremes(record)}"
    longest = record.labels[0]
    return (
        f"no rank is waited for: all wait about alike, longest in {longest.label}, "
        f"{format_duration(longest.median_s)} a step"
    )


def _where(found: WaitedFor, step_s: float) -> str:
    share = f"{100 * found.lost_s / step_s:.0f}% of a step in all"
    collective_s, kind_s = format_duration(found.collective_s), format_duration(found.kind_s)
    if found.collective and found.collective_s >= _MOSTLY * found.kind_s:
        return f"{collective_s} a step longer in {found.collective}, {share}"
    if found.kind:
        most = f", most in {found.collective}, {collective_s}" if found.collective else ""
        return f"{kind_s} a step longer in {found.kind}{most}; {share}"
    return f"{format_duration(found.lost_s)} a step longer, {share}"


def _extremes(record: WaitRecord) -> str:
    """Returns who waits least and who most; all ranks are among the one or the other where the record has them all."""
    total = record.total
    least, most = [total.least_rank], [total.most_rank]
    if len(record.waited_s) == record.ranks:
        middle_s = (total.least_s + total.most_s) / 2
        least = [rank for rank, waited_s in record.waited_s.items() if waited_s < middle_s]
        most = [rank for rank in record.waited_s if rank not in least]
    return f"{_name(least)} wait{'s' * (len(least) == 1)} least, {_name(most)} most"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{_name(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_rank_set(ranks)}"
