"""What `dsrun show JOB --waits` prints: the answer in words, and a table. Reads nothing."""

from __future__ import annotations

from dsrun.contract.wait_records import WaitRecord
from dsrun.units import format_duration

from ..jobs.text import align
from ..jobs.wait_records import waited_for

_HEADING = ("COLLECTIVE", "WAITS", "LEAST", "MEDIAN", "MOST", "LEAST RANK", "MOST RANK")


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
        share = 100 * found.held_s / record.step_s
        return (
            f"rank {found.rank} is waited for: the others stand {format_duration(found.collective_s)} a step longer in "
            f"{found.collective}, {share:.0f}% of a step in all"
        )
    if not record.labels:
        return "no rank has waited"
    longest = record.labels[0]
    return (
        f"no rank is waited for: all wait about alike, longest in {longest.label}, "
        f"{format_duration(longest.median_s)} a step"
    )
