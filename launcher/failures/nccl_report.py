"""Who is behind whom in torch's process groups, from what every rank's flight recorder says. Pure: facts in, lines out.

Does not judge whether a job hangs. What a dump says of one rank is read in `nccl_dumps`.

[Note: front] A group's collectives run one after another on all its ranks, and a rank counts them as it calls them. So
the lowest number that some rank waits in is the front: who is at it waits, who has not called it yet is behind and is
waited for, and who has called something else under that number will never be met.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..number_ranges import named_ranks, numbers_of
from ..protocol import Collective, GroupProgress

#: More groups are counted, not told.
_MOST_LINES = 4
_MOST_TRANSFERS = 8


@dataclass(frozen=True, slots=True)
class GroupFinding:
    """What is known of one group in which ranks wait.

    Attributes:
        text: one line.
        is_mismatch: ranks called different collectives under one number.
        behind: ranks that have not called what the others wait in.
    """

    text: str
    is_mismatch: bool
    behind: tuple[int, ...]


def name_of_group(progress: GroupProgress) -> str:
    """What one calls a group: its label, or torch's own name for it."""
    return progress.label or f"group {progress.name}"


def name_of_wait(progress: Sequence[GroupProgress]) -> str:
    """Returns what a rank has waited in longest, like `all_reduce 57 of default_pg`; empty where in nothing."""
    if not progress:
        return ""
    first = progress[0]
    waits = first.waits or first.transfer
    return "" if waits is None else f"{waits.name} {waits.number} of {name_of_group(first)}"


def findings(progress: Mapping[int, Sequence[GroupProgress]]) -> list[GroupFinding]:
    """Says of each group in which ranks wait who is behind; what tells most comes first.

    Args:
        progress: progress in each process group, by rank, for every rank that left a dump.
    """
    groups: dict[tuple[str, str], dict[int, GroupProgress]] = {}
    for rank, reports in sorted(progress.items()):
        for report in reports:
            groups.setdefault((report.name, report.members), {})[rank] = report
    waiting = {rank for rank, reports in progress.items() if name_of_wait(reports)}
    found: list[GroupFinding] = []
    for (_, members), reports in groups.items():
        everybody = numbers_of(members) or sorted(reports)
        found += _of_collectives(everybody, reports, progress.keys())
        found += _of_transfers(reports)
    # Behind one that waits in another group itself is a consequence; who is behind and waits in nothing is the root.
    return sorted(
        found, key=lambda one: (not one.is_mismatch, not one.behind, bool(one.behind) and waiting >= set(one.behind))
    )


def lines_of(found: Sequence[GroupFinding]) -> list[str]:
    """Returns the findings as lines for people, the first ones only where there are many."""
    lines = [one.text for one in found[:_MOST_LINES]]
    return lines + ([f"ranks wait in {len(found) - _MOST_LINES} more groups"] if len(found) > _MOST_LINES else [])


def _of_collectives(
    everybody: Sequence[int], reports: Mapping[int, GroupProgress], heard: Collection[int]
) -> list[GroupFinding]:
    """Judges the front of one group, see [Note: front]; nothing where nobody waits."""
    fronts = [report.waits.number for report in reports.values() if report.waits is not None]
    if not fronts:
        return []
    front = min(fronts)
    calls: dict[tuple[str, str], list[int]] = {}
    lines: dict[tuple[str, str], str] = {}
    over: list[tuple[int, Collective | None]] = []
    behind: list[int] = []
    for rank in everybody:
        report = reports.get(rank)
        if report is not None and report.waits is not None and report.waits.number == front:
            key = (report.waits.name, report.waits.data)
            calls.setdefault(key, []).append(rank)
            lines.setdefault(key, report.waits.line)
        elif report is not None and report.queued is not None and report.queued.number >= front:
            done = report.completed
            over.append((rank, done if done is not None and done.number == front else None))
        elif rank in heard:
            behind.append(rank)
    # A rank that only sends may be through with what the others wait in; in another collective it has met nobody.
    past = [rank for rank, done in over if done is None or (done.name, done.data) in calls]
    for rank, done in over:
        if done is not None and rank not in past:
            calls.setdefault((done.name, done.data), []).append(rank)
            lines.setdefault((done.name, done.data), done.line)
    # What most have called is taken for what was meant.
    (meant, meant_ranks), *others = sorted(calls.items(), key=lambda call: (-len(call[1]), call[1][0]))
    name, data = meant
    label = name_of_group(next(iter(reports.values())))
    facts = [
        f"{label}: {named_ranks(meant_ranks)} {_is(meant_ranks, 'waits', 'wait')} in {name} {front}{_at(lines[meant])}"
    ]
    for (other_name, other_data), ranks in others:
        differs = f" of {other_data}, not of {data}" if other_name == name else ""
        facts.append(
            f"{named_ranks(ranks)} {_is(ranks)} in {other_name} {front}{differs}{_at(lines[other_name, other_data])}"
        )
    if behind:
        facts.append(f"{named_ranks(behind)} {_is(behind, 'has', 'have')} not called it{_last(reports, behind)}")
    if past:
        facts.append(f"{named_ranks(past)} {_is(past)} past it")
    silent = [rank for rank in everybody if rank not in heard]
    if silent:
        facts.append(f"{named_ranks(silent)} left no dump")
    if len(facts) == 1:
        facts.append("and all its ranks have called it: a GPU or the network between them is stuck")
    return [GroupFinding(", ".join(facts), is_mismatch=bool(others), behind=tuple(behind))]


def _of_transfers(reports: Mapping[int, GroupProgress]) -> list[GroupFinding]:
    waits = [
        f"rank {rank} waits in {report.transfer.name}{_at(report.transfer.line)}"
        for rank, report in reports.items()
        if report.transfer is not None
    ]
    if not waits:
        return []
    more = f", and {len(waits) - _MOST_TRANSFERS} more" if len(waits) > _MOST_TRANSFERS else ""
    text = f"{name_of_group(next(iter(reports.values())))}: {', '.join(waits[:_MOST_TRANSFERS])}{more}"
    return [GroupFinding(text, is_mismatch=False, behind=())]


def _last(reports: Mapping[int, GroupProgress], behind: Sequence[int]) -> str:
    last = {
        f"{report.queued.name} {report.queued.number}"
        for rank in behind
        if (report := reports.get(rank)) is not None and report.queued is not None
    }
    return f" (last {last.pop()})" if len(last) == 1 else ""


def _at(line: str) -> str:
    return f" ({line})" if line else ""


def _is(ranks: Sequence[int], one: str = "is", many: str = "are") -> str:
    return one if len(ranks) == 1 else many
