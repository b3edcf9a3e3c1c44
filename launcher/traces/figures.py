"""What a rank's profile comes to: seconds of operations, kernels and waits by step, and the operations that take most.

Pure: a trace in, figures out.

[Note: seconds of a profile] Operations call each other, so their seconds are those in which one ran on its thread, each
counted once, without waits for other ranks inside of it. Kernels of several streams run at once; theirs are those in
which the GPU did something. An operation of the table has the seconds that it took itself, without those that it called
and those that it waited.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .rank_trace import KERNELS, LABEL, WAIT, RankTrace

_CPU_OP = "cpu_op"
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Seconds of one step on one rank, see [Note: seconds of a profile].

    Attributes:
        step: Number of the step.
        seconds: Seconds that it took, with what the profiler itself takes.
        cpu_ops_s: Seconds in which an operation ran on the CPU.
        kernels_s: Seconds in which the GPU ran a kernel or copied.
        waits_s: Seconds in which the thread has waited for other ranks.
    """

    step: int
    seconds: float
    cpu_ops_s: float
    kernels_s: float
    waits_s: float


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of all steps.

    Attributes:
        name: Name that torch or the kernel has.
        place: Device that it ran on.
        calls: Number of calls.
        seconds: Seconds that it took itself.
    """

    name: str
    place: Literal["cpu", "gpu"]
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Figures of one rank.

    Attributes:
        rank: Number of the rank.
        steps: Steps in order.
        operations: Operations that take most, the first one most.
    """

    rank: int
    steps: tuple[StepFigures, ...]
    operations: tuple[Operation, ...]


def figures_of(trace: RankTrace, *, most_operations: int = 10) -> RankFigures:
    """Returns what a profile comes to.

    Args:
        trace: Profile of a rank.
        most_operations: Operations to name.
    """
    spans = [event for event in trace.events if event.get("ph") == "X"]
    ops = [event for event in spans if event.get("cat") == _CPU_OP]
    kernels = [event for event in spans if event.get("cat") in KERNELS]
    waits = [event for event in spans if event.get("cat") == LABEL and event["name"].startswith(WAIT)]
    steps = sorted(trace.steps(), key=lambda step: step[1])
    begins = [begin for _, begin, _ in steps]
    busy_s = _seconds_in(begins, _busy_by_thread([*ops, *waits]))
    waits_s = _seconds_in(begins, _busy_by_thread(waits))
    kernels_s = _seconds_in(begins, _union((each["ts"], each["ts"] + each["dur"]) for each in kernels))
    return RankFigures(
        rank=trace.rank,
        steps=tuple(
            StepFigures(number, dur / 1e6, max(0.0, busy_s[i] - waits_s[i]), kernels_s[i], waits_s[i])
            for i, (number, _, dur) in enumerate(steps)
        ),
        operations=_top(ops, waits, kernels, most_operations),
    )


def _busy_by_thread(ops: Iterable[dict[str, Any]]) -> list[Span]:
    by_thread: defaultdict[tuple[Any, Any], list[Span]] = defaultdict(list)
    for op in ops:
        by_thread[op["pid"], op["tid"]].append((op["ts"], op["ts"] + op["dur"]))
    return [span for spans in by_thread.values() for span in _union(spans)]


def _union(spans: Iterable[Span]) -> list[Span]:
    """Returns spans that do not overlap and cover the same time."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _seconds_in(begins: Sequence[float], spans: Iterable[Span]) -> list[float]:
    """Returns the seconds of spans by the step in which each begins."""
    seconds = [0.0] * len(begins)
    for begin, end in spans:
        if (index := bisect_right(begins, begin) - 1) >= 0:
            seconds[index] += (end - begin) / 1e6
    return seconds


def _top(
    ops: Sequence[dict[str, Any]], waits: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]], most: int
) -> tuple[Operation, ...]:
    totals: defaultdict[tuple[str, Literal["cpu", "gpu"]], list[float]] = defaultdict(lambda: [0, 0.0])
    for name, own_us in _own_times([*ops, *waits])[: len(ops)]:
        totals[name, "cpu"][0] += 1
        totals[name, "cpu"][1] += own_us
    for kernel in kernels:
        totals[kernel["name"], "gpu"][0] += 1
        totals[kernel["name"], "gpu"][1] += kernel["dur"]
    found = [Operation(name, place, int(calls), us / 1e6) for (name, place), (calls, us) in totals.items()]
    return tuple(sorted(found, key=lambda each: -each.seconds)[:most])


def _own_times(ops: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Returns each operation's name and the microseconds that it took without those that it called."""
    own = [op["dur"] for op in ops]
    by_thread: defaultdict[tuple[Any, Any], list[int]] = defaultdict(list)
    for index, op in enumerate(ops):
        by_thread[op["pid"], op["tid"]].append(index)
    for indices in by_thread.values():
        open_calls: list[int] = []
        # Of two that begin at once the longer one has called the other.
        for index in sorted(indices, key=lambda i: (ops[i]["ts"], -ops[i]["dur"])):
            while open_calls and ops[open_calls[-1]]["ts"] + ops[open_calls[-1]]["dur"] <= ops[index]["ts"]:
                open_calls.pop()
            if open_calls:
                own[open_calls[-1]] -= ops[index]["dur"]
            open_calls.append(index)
    return [(op["name"], max(0.0, us)) for op, us in zip(ops, own, strict=True)]
